/* Elementary functions of float, without branches, so that loops over them become vectors. Each operation is rounded by
itself, and those that are fused say so, so that a result depends on no processor. Errors are a few units in the last place, NaN stays, and infinity gives
what it should. The polynomials are minimax fits to the functions that stand beside them. */

#include <math.h>
#include <stdint.h>
#include <string.h>

INSIDE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INSIDE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* a where something holds, else b: both are computed, where ?: may become a branch. */
INSIDE float chosen(int holds, float a, float b) {
    uint32_t mask = (uint32_t)-holds;
    return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

/* The nearest integer to x for |x| < 2^22, in its low bits, and as a number. */
#define SHIFT 12582912.0f
#define LOG2_E 1.44269504f
#define LN_2_HIGH 0.693359375f /* of 10 bits, so that times an integer it is exact */
#define LN_2_LOW -2.12194440e-4f

INSIDE float power_of_2(int32_t n) { return float_of((uint32_t)(n + 127) << 23); }

/* (exp(r) - 1 - r) / r^2 for |r| <= 0.49, by 5e-9 */
INSIDE float exp_rest(float r) {
    float q = 1.98742701e-4f;
    q = fmaf(q, r, 1.39783064e-3f);
    q = fmaf(q, r, 8.33344294e-3f);
    q = fmaf(q, r, 4.16658635e-2f);
    q = fmaf(q, r, 1.66666656e-1f);
    return fmaf(q, r, 0.5f);
}

/* The same, but its low 9 bits are those of the integer plus twice the exponent's bias. */
#define BIASED_SHIFT (SHIFT + 254.0f)

/* exp(x + rest) for a rest of at most 0.14 */
INSIDE float exp_with(float x, float rest, int has_rest) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    float shifted = fmaf(x, LOG2_E, BIASED_SHIFT);
    float whole = shifted - BIASED_SHIFT;
    float r = fmaf(whole, -LN_2_LOW, fmaf(whole, -LN_2_HIGH, x));
    r = has_rest ? r + rest : r;
    float power = fmaf(r * r, exp_rest(r), r) + 1.0f;
    uint32_t exponents = bits_of(shifted) << 23, half = exponents >> 1 & 0xFF800000u;
    /* times 2^n in two steps, for results at both ends of the type */
    return power * float_of(half) * float_of(exponents - half);
}

INSIDE float exp_of_sum(float x, float rest) { return exp_with(x, rest, 1); }
INSIDE float exp_of(float x) { return exp_with(x, 0.0f, 0); }

/* exp(x) - 1 for x <= 0 */
INSIDE float expm1_below_0(float x) {
    x = x < -30.0f ? -30.0f : x;
    float shifted = fmaf(x, LOG2_E, SHIFT);
    int32_t n = (int32_t)(bits_of(shifted) - bits_of(SHIFT));
    float whole = shifted - SHIFT;
    float r = fmaf(whole, -LN_2_LOW, fmaf(whole, -LN_2_HIGH, x));
    float power = power_of_2(n);
    return fmaf(fmaf(r * r, exp_rest(r), r), power, power - 1.0f);
}

/* log(1 + u) for u from 0 to 1: twice the inverse hyperbolic tangent of u / (u + 2) */
INSIDE float log1p_of_unit(float u) {
    float s = u / (u + 2.0f), t = s * s;
    float q = 1.16167819e-1f;
    q = fmaf(q, t, 1.08522661e-1f);
    q = fmaf(q, t, 1.42962496e-1f);
    q = fmaf(q, t, 1.99998516e-1f);
    q = fmaf(q, t, 3.33333337e-1f);
    return (s * t * q + s) * 2.0f;
}

/* What softplus lies above relu. */
INSIDE float softplus_rest(float x) { return log1p_of_unit(exp_of(-fabsf(x))); }

/* erf(x) for |x| <= 1 */
INSIDE float erf_near_0(float x) {
    float t = x * x;
    float q = -9.64151898e-6f;
    q = fmaf(q, t, 1.12569489e-4f);
    q = fmaf(q, t, -8.48282898e-4f);
    q = fmaf(q, t, 5.22094544e-3f);
    q = fmaf(q, t, -2.68654000e-2f);
    q = fmaf(q, t, 1.12837820e-1f);
    q = fmaf(q, t, -3.76126384e-1f);
    return x * (q * t + 1.12837917f);
}

/* exp(a^2) erfc(a) / 2 for a from 0 to 10, a polynomial in u = 1 - 5 / (a + 5 / 2), divided by a + 5 / 2 */
INSIDE float erfc_ratio(float a) {
    float share = 1.0f / (a + 2.5f), u = 1.0f - 5.0f * share;
    float q = 7.13032645e-5f;
    q = fmaf(q, u, 3.14828311e-4f);
    q = fmaf(q, u, -2.62797762e-4f);
    q = fmaf(q, u, -2.40223002e-3f);
    q = fmaf(q, u, 4.21064625e-3f);
    q = fmaf(q, u, 1.41804054e-2f);
    q = fmaf(q, u, -8.56273170e-2f);
    q = fmaf(q, u, 2.26957066e-1f);
    q = fmaf(q, u, -4.02325866e-1f);
    q = fmaf(q, u, 5.27015910e-1f);
    return q * share;
}

/* exp(-c x^2), c 1 or 1/2: the square is exact, as that of 12 bits and what is left of it. */
INSIDE float bell_of(float x, float c) {
    float a = fabsf(x);
    a = a > 15.0f ? 15.0f : a;
    float high = float_of(bits_of(a) & 0xFFFFF000u);
    return exp_of_sum(-c * (high * high), -c * ((a - high) * (a + high)));
}

/* Half of erfc(|x|), and the probability that a standard normal number is above |x|. */
INSIDE float half_erfc_of_size(float x) { return erfc_ratio(fabsf(x)) * bell_of(x, 1.0f); }
INSIDE float normal_tail(float x) { return erfc_ratio(fabsf(x) * 0.707106781f) * bell_of(x, 0.5f); }

INSIDE float ndtr_of(float x) {
    float tail = normal_tail(x);
    return chosen(x < 0.0f, tail, 1.0f - tail);
}

INSIDE float sigmoid_of(float x) { return 1.0f / (exp_of(-x) + 1.0f); }
