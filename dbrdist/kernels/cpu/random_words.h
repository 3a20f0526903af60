/* Random words by Philox 4x64-10 (Salmon et al. 2011), as NumPy's Philox makes them from a counter and a key. Included by
vector_loops.h. */

#ifdef __SIZEOF_INT128__
enum { HAS_PHILOX = 1, BLOCKS_AT_ONCE = 4 };
typedef unsigned __int128 Product;

/* Four words for each of several counters, so that no product waits for the one before. */
INSIDE void philox(uint64_t *restrict words, const uint64_t *counter, const uint64_t *key, uint64_t first, const int count) {
    uint64_t c[BLOCKS_AT_ONCE][4], k0 = key[0], k1 = key[1];
    for (int b = 0; b < count; ++b) {
        uint64_t carry = first + (uint64_t)b; /* NumPy counts on before it makes words: the caller starts from 1 */
        for (int i = 0; i < 4; ++i) {
            c[b][i] = counter[i] + carry;
            carry = c[b][i] < carry;
        }
    }
    for (int round = 0; round < 10; ++round) {
        for (int b = 0; b < count; ++b) {
            Product p = (Product)0xD2E7470EE14C6C93u * c[b][0], q = (Product)0xCA5A826395121157u * c[b][2];
            c[b][0] = (uint64_t)(q >> 64) ^ c[b][1] ^ k0;
            c[b][1] = (uint64_t)q;
            c[b][2] = (uint64_t)(p >> 64) ^ c[b][3] ^ k1;
            c[b][3] = (uint64_t)p;
        }
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    for (int b = 0; b < count; ++b)
        for (int i = 0; i < 4; ++i) words[4 * b + i] = c[b][i];
}

/* Words of the blocks from start to stop; arrays: words, counter, key. */
static void philox_loop(void **arrays, ptrdiff_t start, ptrdiff_t stop, const double *numbers) {
    uint64_t *words = (uint64_t *)arrays[0];
    const uint64_t *counter = (const uint64_t *)arrays[1], *key = (const uint64_t *)arrays[2];
    (void)numbers;
    for (; start + BLOCKS_AT_ONCE <= stop; start += BLOCKS_AT_ONCE)
        philox(words + 4 * start, counter, key, (uint64_t)start + 1, BLOCKS_AT_ONCE);
    for (; start < stop; ++start) philox(words + 4 * start, counter, key, (uint64_t)start + 1, 1);
}

static void random_words(void *words, void *counter, void *key, ptrdiff_t num_blocks) {
    void *arrays[3] = {words, counter, key};
    Work work = {philox_loop, arrays, num_blocks, 2, NULL, NULL, 0, NULL, 3, 8};
    run_work(&work, 8 * num_blocks);
}
#else
enum { HAS_PHILOX = 0 };
static void random_words(void *words, void *counter, void *key, ptrdiff_t num_blocks) {}
#endif
