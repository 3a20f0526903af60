/* Random words by Philox 4x64-10 (Salmon et al. 2011), as NumPy's Philox makes them from a counter and a key. Included by
vector_loops.h. */

#ifdef __SIZEOF_INT128__
enum { HAS_PHILOX = 1 };
typedef unsigned __int128 Product;

/* The four words of a block. A processor works at several blocks by itself: two or four in one step, whose numbers need more than
the registers, take 1.8 and 2.5 ms for 512k words instead of 1.4. NumPy counts on before it makes words: the first carry is 1. */
INSIDE void philox(uint64_t *restrict words, const uint64_t *counter, const uint64_t *key, uint64_t carry) {
    uint64_t c[4], k0 = key[0], k1 = key[1];
    for (int i = 0; i < 4; ++i) {
        c[i] = counter[i] + carry;
        carry = c[i] < carry;
    }
    for (int round = 0; round < 10; ++round) {
        Product p = (Product)0xD2E7470EE14C6C93u * c[0], q = (Product)0xCA5A826395121157u * c[2];
        c[0] = (uint64_t)(q >> 64) ^ c[1] ^ k0;
        c[1] = (uint64_t)q;
        c[2] = (uint64_t)(p >> 64) ^ c[3] ^ k1;
        c[3] = (uint64_t)p;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    for (int i = 0; i < 4; ++i) words[i] = c[i];
}

/* Words of the blocks from start to stop; arrays: words, counter, key. */
static void philox_loop(void **arrays, ptrdiff_t start, ptrdiff_t stop, const double *numbers) {
    uint64_t *words = (uint64_t *)arrays[0];
    const uint64_t *counter = (const uint64_t *)arrays[1], *key = (const uint64_t *)arrays[2];
    (void)numbers;
    for (; start < stop; ++start) philox(words + 4 * start, counter, key, (uint64_t)start + 1);
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
