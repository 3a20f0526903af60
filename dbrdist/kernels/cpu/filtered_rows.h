/* Weighted means of rows of bytes, as of an image that is resized: row r of the result is the sum over k below counts[r] of
weights[r][k] times the row first[r] + k. Included by vector_loops.h. Each sum is exact in float (see
datasets/image/filtering.py), so that neither the order nor a fused multiply-add changes it; it is rounded to the nearest
byte, what is halfway upwards. */

typedef struct {
    const unsigned char *pixels; /* (old, width) */
    const ptrdiff_t *first, *counts;
    const float *weights; /* (new, taps) */
    unsigned char *out;   /* (new, width) */
    ptrdiff_t new, taps, width;
} Filtering;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target("avx2,fma")))
#define HALF_UP 0x1p-16f   /* as in filtering.py */
#define TO_WHOLE 0x1.8p23f /* added and taken away again, it leaves a whole number */

/* Some columns of a row: from a pixel of the first row that counts on. */
INSIDE void filter_columns(const Filtering *f, const unsigned char *pixel, const float *weights, ptrdiff_t count,
                           unsigned char *out, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        float sum = 0;
        for (ptrdiff_t k = 0; k < count; ++k) sum += weights[k] * (float)pixel[k * f->width + i];
        float whole = ((sum + HALF_UP) + TO_WHOLE) - TO_WHOLE;
        whole = whole > 0 ? whole : 0;
        out[i] = (unsigned char)(int)(whole < 255 ? whole : 255);
    }
}

WITH_AVX2 INSIDE __m256 eight_pixels(const unsigned char *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

WITH_AVX2 INSIDE __m256i eight_wholes(__m256 sum) {
    return _mm256_cvtps_epi32(_mm256_add_ps(sum, _mm256_set1_ps(HALF_UP)));
}

/* 32 columns: the compiler, which cannot know that they are bytes that become floats for one sum alone, takes thrice as
long. */
WITH_AVX2 INSIDE void filter_32(const unsigned char *pixel, ptrdiff_t width, const float *weights, ptrdiff_t count,
                                unsigned char *out) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    for (ptrdiff_t k = 0; k < count; ++k, pixel += width) {
        const __m256 weight = _mm256_set1_ps(weights[k]);
        a = _mm256_fmadd_ps(weight, eight_pixels(pixel), a);
        b = _mm256_fmadd_ps(weight, eight_pixels(pixel + 8), b);
        c = _mm256_fmadd_ps(weight, eight_pixels(pixel + 16), c);
        d = _mm256_fmadd_ps(weight, eight_pixels(pixel + 24), d);
    }
    __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(eight_wholes(a), eight_wholes(b)),
                                        _mm256_packs_epi32(eight_wholes(c), eight_wholes(d)));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, bytes);
}

WITH_AVX2 static void filter_row_avx2(const Filtering *f, const unsigned char *pixel, const float *weights,
                                      ptrdiff_t count, unsigned char *out) {
    const ptrdiff_t width = f->width;
    if (width < 32) {
        filter_columns(f, pixel, weights, count, out, width);
        return;
    }
    ptrdiff_t i = 0;
    for (; i + 32 <= width; i += 32) filter_32(pixel + i, width, weights, count, out + i);
    if (i < width) filter_32(pixel + width - 32, width, weights, count, out + width - 32); /* some once more */
}

static int can_filter(void) { return level >= 0; }

static void filter(const Filtering *f) {
    for (ptrdiff_t r = 0; r < f->new; ++r)
        filter_row_avx2(f, f->pixels + f->first[r] * f->width, f->weights + r * f->taps, f->counts[r], f->out + r * f->width);
}
#else /* products of matrices are faster than what a compiler makes of this */
static int can_filter(void) { return 0; }
static void filter(const Filtering *f) { (void)f; }
#endif
