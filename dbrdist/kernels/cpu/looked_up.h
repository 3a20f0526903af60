/* Bytes of images looked up in a table of floats (256, channels). Included by vector_loops.h. Values are copied, so that
every processor gives the same bits. */

typedef struct {
    const unsigned char *bytes; /* (pixels, channels) */
    const float *table;         /* (256, channels) */
    float *out;                 /* (pixels, channels) */
    ptrdiff_t size, channels;
} Lookup;

enum { MOST_CHANNELS = 16 };

#if defined(__x86_64__) && defined(__GNUC__)

/* Eight bytes at a time; whose channels those are comes back after as many steps as there are channels. */
WITH_AVX2 static void look_up(const Lookup *l) {
    __m256i channel[MOST_CHANNELS];
    const ptrdiff_t c = l->channels;
    for (ptrdiff_t k = 0; k < c; ++k) {
        int lanes[8];
        for (ptrdiff_t j = 0; j < 8; ++j) lanes[j] = (int)((8 * k + j) % c);
        channel[k] = _mm256_loadu_si256((const __m256i *)lanes);
    }
    const __m256i width = _mm256_set1_epi32((int)c);
    ptrdiff_t i = 0, k = 0;
    for (; i + 8 <= l->size; i += 8) {
        __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(l->bytes + i)));
        __m256i at = _mm256_add_epi32(_mm256_mullo_epi32(byte, width), channel[k]);
        _mm256_storeu_ps(l->out + i, _mm256_i32gather_ps(l->table, at, 4));
        k = k + 1 == c ? 0 : k + 1;
    }
    for (; i < l->size; ++i) l->out[i] = l->table[l->bytes[i] * c + i % c];
}
#else /* OpenCV has as fast a one */
static void look_up(const Lookup *l) { (void)l; }
#endif
