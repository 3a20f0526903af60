/* Loops from one type to another, as NumPy and ml_dtypes round. Included by vector_loops.h, which
says what the macros mean. */

/* To 16 bits of float: to the nearest, of two as near to the even one; NaN keeps its leading bits. */
INSIDE uint16_t half_of(float x) {
    uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFFu;
    uint32_t normal = (size + 0xC8000FFFu + (size >> 13 & 1)) >> 13; /* the exponent is less by 112 */
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3F000000u;  /* whose last bit is 2^-24 */
    uint32_t nan = 0x7C00u + (size >> 13 & 0x3FFu);
    nan += nan == 0x7C00u;
    uint32_t half = size < 0x38800000u ? small : normal;
    half = size >= 0x47800000u ? 0x7C00u : half;
    half = size > 0x7F800000u ? nan : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

INSIDE float float_of_half(uint16_t half) {
    uint32_t size = half & 0x7FFFu, sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t scaled = bits_of(float_of(size << 13) * 0x1p112f); /* exact, of what is small too */
    uint32_t beyond = size << 13 | 0x7F800000u;
    return float_of((size >= 0x7C00u ? beyond : scaled) | sign);
}

/* To bfloat16: to the nearest, of two as near to the even one; NaN becomes one NaN of either sign. */
INSIDE uint16_t bfloat_of(float x) {
    uint32_t bits = bits_of(x), nearest = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    uint32_t nan = 0x7FC0u | (bits >> 16 & 0x8000u);
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : nearest);
}

#define CONVERSION(name, FROM, TO, ...)                                  \
    FOR_EACH_LEVEL(name, float, TO *restrict to = (TO *)arrays[0];       \
                   const FROM *restrict from = (const FROM *)arrays[1];, , to[i] = __VA_ARGS__;)
CONVERSION(slow_float_to_half, float, uint16_t, half_of(from[i]))
CONVERSION(slow_half_to_float, uint16_t, float, float_of_half(from[i]))
CONVERSION(float_to_bfloat, float, uint16_t, bfloat_of(from[i]))
CONVERSION(bfloat_to_float, uint16_t, float, float_of((uint32_t)from[i] << 16))
CONVERSION(float_to_double, float, double, from[i])
CONVERSION(double_to_float, double, float, (float)from[i])

/* The processor's own instructions take half of the time or less, and give the same but for NaN. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define BY_INSTRUCTION(name, TARGET, WIDTH, FROM, TO, slow, LOAD, HAS_NAN, STORE)                     \
    __attribute__((target(TARGET))) static void name(void **arrays, ptrdiff_t start, ptrdiff_t stop,  \
                                                     const double *numbers) {                         \
        TO *restrict to = (TO *)arrays[0];                                                            \
        const FROM *restrict from = (const FROM *)arrays[1];                                          \
        ptrdiff_t i = start;                                                                          \
        (void)numbers;                                                                                \
        for (; i + WIDTH <= stop; i += WIDTH) {                                                       \
            LOAD                                                                                      \
            if (HAS_NAN)                                                                              \
                for (int k = 0; k < WIDTH; ++k) to[i + k] = slow(from[i + k]);                        \
            else STORE                                                                                \
        }                                                                                             \
        for (; i < stop; ++i) to[i] = slow(from[i]);                                                  \
    }
#define HAS_NAN_OF_8 _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q))
#define HAS_NAN_OF_16 _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)
BY_INSTRUCTION(to_half_by_8, "avx2,fma,f16c", 8, float, uint16_t, half_of, __m256 x = _mm256_loadu_ps(from + i);,
               HAS_NAN_OF_8,
               _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));)
BY_INSTRUCTION(to_half_by_16, "avx512f", 16, float, uint16_t, half_of, __m512 x = _mm512_loadu_ps(from + i);,
               HAS_NAN_OF_16,
               _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));)
BY_INSTRUCTION(to_float_by_8, "avx2,fma,f16c", 8, uint16_t, float, float_of_half,
               __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i)));, HAS_NAN_OF_8,
               _mm256_storeu_ps(to + i, x);)
BY_INSTRUCTION(to_float_by_16, "avx512f", 16, uint16_t, float, float_of_half,
               __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i)));, HAS_NAN_OF_16,
               _mm512_storeu_ps(to + i, x);)

static int has_half; /* the instruction for 8 at a time */
static void find_half(void) {
    unsigned a, b, c = 0, d;
    has_half = __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}

#define WITH_INSTRUCTION(name, by_8, by_16)                                                                     \
    static void name(void **arrays, ptrdiff_t start, ptrdiff_t stop, const double *numbers) {                  \
        Loop const loops[] = {has_half ? by_8 : slow_##name##_avx2, by_16};                                    \
        loops[level](arrays, start, stop, numbers);                                                            \
    }
WITH_INSTRUCTION(float_to_half, to_half_by_8, to_half_by_16)
WITH_INSTRUCTION(half_to_float, to_float_by_8, to_float_by_16)
#define LEVELS_OF_HALF(f) {f, f}
#else
#define LEVELS_OF_HALF(f) {slow_##f##_plain}
static void find_half(void) {}
#endif

static Loop const CONVERSIONS[][NUM_LEVELS] = {
    LEVELS_OF_HALF(float_to_half), LEVELS_OF_HALF(half_to_float), ALL_LEVELS(float_to_bfloat),
    ALL_LEVELS(bfloat_to_float), ALL_LEVELS(float_to_double), ALL_LEVELS(double_to_float),
};

enum { NUM_CONVERSIONS = sizeof(CONVERSIONS) / sizeof(CONVERSIONS[0]) };
/* by the characters of NumPy's types, E for bfloat16: from and to; and the bytes of an element of both */
static const char *const CONVERSION_NAMES[] = {"fe", "ef", "fE", "Ef", "fd", "df"};
static const int CONVERSION_BYTES[][2] = {{4, 2}, {2, 4}, {4, 2}, {2, 4}, {4, 8}, {8, 4}};
