/* Batch normalization of images that lie as planes (N, C, HW): i counts the channels. numbers: n = N HW elements of a channel,
C, HW, eps. Included by vector_loops.h, which says what the macros mean. Sums run in float for up to CHUNK elements, in as
many lanes as anywhere, and in double beyond. */

enum { CHUNK = 1 << 11 };
#define PLANES                                                                           \
    const ptrdiff_t n = (ptrdiff_t)numbers[0];                                           \
    const ptrdiff_t channels = (ptrdiff_t)numbers[1];                                    \
    const ptrdiff_t plane = (ptrdiff_t)numbers[2];                                       \
    const double eps = numbers[3];
#define FOR_PLANES for (ptrdiff_t image = 0, at = i * plane; image < n / plane; ++image, at += channels * plane)

INSIDE double plane_sum(const float *restrict x, ptrdiff_t n) {
    double sum = 0;
    for (ptrdiff_t start = 0; start < n; start += CHUNK) {
        ptrdiff_t length = n - start < CHUNK ? n - start : CHUNK;
        sum += row_sum(x + start, length, length - length % LANES);
    }
    return sum;
}

/* Add to sums[0] and sums[1] the sums of a and of a b for a chunk; each first computed by FIRST and SECOND. */
#define TWO_SUMS(FIRST, SECOND)                                             \
    for (ptrdiff_t start = 0; start < n; start += CHUNK) {                  \
        float a[LANES] = {0}, b[LANES] = {0};                               \
        ptrdiff_t stop = n - start < CHUNK ? n : start + CHUNK;             \
        ptrdiff_t whole = stop - (stop - start) % LANES;                    \
        for (ptrdiff_t first = start; first < whole; first += LANES)        \
            for (int k = 0; k < LANES; ++k) {                               \
                const ptrdiff_t j = first + k;                              \
                float one = FIRST;                                          \
                a[k] += one;                                                \
                b[k] += one * (SECOND);                                     \
            }                                                               \
        sums[0] += sum_of_lanes(a);                                         \
        sums[1] += sum_of_lanes(b);                                         \
        for (ptrdiff_t j = whole; j < stop; ++j) {                          \
            float one = FIRST;                                              \
            sums[0] += one;                                                 \
            sums[1] += one * (SECOND);                                      \
        }                                                                   \
    }

INSIDE void distance_sums(double *sums, const float *restrict x, float middle, ptrdiff_t n) { TWO_SUMS(x[j] - middle, one) }

INSIDE void slope_sums(double *sums, const float *restrict gy, const float *restrict x, float middle, ptrdiff_t n) {
    TWO_SUMS(gy[j], x[j] - middle)
}

INSIDE void normalize_plane(float *restrict y, const float *restrict x, float middle, float scale, float shift, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = (x[j] - middle) * scale + shift;
}

INSIDE float scale_of(float gamma, float var, double eps) { return gamma / sqrtf(var + (float)eps); }

FLOAT_LOOP(normalize_planes, OUT(0, y) OUT(1, mean) OUT(2, var) IN(3, x) IN(4, gamma) IN(5, beta), PLANES, {
    double sum = 0, sums[2] = {0, 0};
    FOR_PLANES sum += plane_sum(x + at, plane);
    float middle = (float)(sum / (double)n);
    FOR_PLANES distance_sums(sums, x + at, middle, plane);
    double rest = sums[0] / (double)n, square = sums[1] / (double)n - rest * rest;
    mean[i] = middle + (float)rest;
    var[i] = (float)(square < 0 ? 0 : square);
    float scale = scale_of(gamma[i], var[i], eps);
    FOR_PLANES normalize_plane(y + at, x + at, mean[i], scale, beta[i], plane);
})

FLOAT_LOOP(apply_to_planes, OUT(0, y) IN(1, x) IN(2, gamma) IN(3, beta) IN(4, mean) IN(5, var), PLANES, {
    float scale = scale_of(gamma[i], var[i], eps);
    FOR_PLANES normalize_plane(y + at, x + at, mean[i], scale, beta[i], plane);
})

INSIDE void plane_gradient(float *restrict gx, const float *restrict x, const float *restrict gy, float middle, float scale,
                           float less, float slope, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = scale * ((gy[j] - less) - (x[j] - middle) * slope);
}

/* gx = gamma / s (gy - sum gy / n - x_hat sum(gy x_hat) / n), s the root of var + eps */
FLOAT_LOOP(normalize_planes_backward,
           OUT(0, gx) OUT(1, ggamma) OUT(2, gbeta) IN(3, x) IN(4, gy) IN(5, gamma) IN(6, mean) IN(7, var), PLANES, {
    double sums[2] = {0, 0}, inverse = 1 / sqrt((double)var[i] + eps);
    FOR_PLANES slope_sums(sums, gy + at, x + at, mean[i], plane);
    ggamma[i] = (float)(sums[1] * inverse);
    gbeta[i] = (float)sums[0];
    float less = (float)(sums[0] / (double)n), slope = (float)(sums[1] * inverse * inverse / (double)n);
    FOR_PLANES plane_gradient(gx + at, x + at, gy + at, mean[i], (float)(gamma[i] * inverse), less, slope, plane);
})
