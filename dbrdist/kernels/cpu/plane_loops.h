/* Batch normalization of images that lie as planes (N, C, HW): i counts the channels. numbers: n = N HW elements of a channel,
C, HW, eps. Included by vector_loops.h, which says what the macros mean. Sums run in float for up to CHUNK elements, in as
many lanes as anywhere, and in double beyond. */

enum { CHUNK = 1 << 11 };
#define PLANES                                                                           \
    const ptrdiff_t n = (ptrdiff_t)numbers[0];                                           \
    const ptrdiff_t channels = (ptrdiff_t)numbers[1];                                    \
    const ptrdiff_t plane = (ptrdiff_t)numbers[2];                                       \
    const double eps = numbers[3];
/* Several channels take turns, image after image, where their planes are small: a plane of 7 x 7 is few cache lines. */
enum { PLANE_TURNS = 16, TURNS_ELEMENTS = 1 << 16 };
#define PLANE_BY_TURNS                                                                           \
    ptrdiff_t turns = TURNS_ELEMENTS / n < 1 ? 1 : TURNS_ELEMENTS / n;                           \
    turns = turns > PLANE_TURNS ? PLANE_TURNS : turns;                                           \
    turns = turns > stop - i ? stop - i : turns;                                                 \
    const ptrdiff_t first = i;                                                                   \
    i += turns - 1;
#define FOR_PLANES                                                                               \
    for (ptrdiff_t image = 0, at = first * plane; image < n / plane; ++image, at += (channels - turns) * plane) \
        for (ptrdiff_t t = 0; t < turns; ++t, at += plane)
#define FOR_TURNS for (ptrdiff_t t = 0, c = first; t < turns; ++t, ++c)

INSIDE double plane_sum(const float *restrict x, ptrdiff_t n) {
    double sum = 0;
    for (ptrdiff_t start = 0; start < n; start += CHUNK) {
        float lanes[LANES] = {0};
        ptrdiff_t stop = n - start < CHUNK ? n : start + CHUNK;
        ptrdiff_t whole = stop - (stop - start) % LANES;
        for (ptrdiff_t j = start; j < whole; j += LANES)
            for (int k = 0; k < LANES; ++k) lanes[k] += x[j + k];
        if (whole < stop) {
            float rest[LANES] = {0};
            for (ptrdiff_t j = whole; j < stop; ++j) rest[j - whole] = x[j];
            for (int k = 0; k < LANES; ++k) lanes[k] += rest[k];
        }
        sum += sum_of_lanes(lanes);
    }
    return sum;
}

/* Add to sums[0] and sums[1] the sums of a and of a b for a chunk; each first computed by FIRST and SECOND. The elements that
fill no lanes are laid out first: lanes that are added to one by one would be kept in memory, not in registers. */
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
        if (whole < stop) {                                                 \
            float c[LANES] = {0}, d[LANES] = {0};                           \
            for (ptrdiff_t j = whole; j < stop; ++j) {                      \
                float one = FIRST;                                          \
                c[j - whole] = one;                                         \
                d[j - whole] = one * (SECOND);                              \
            }                                                               \
            for (int k = 0; k < LANES; ++k) a[k] += c[k];                   \
            for (int k = 0; k < LANES; ++k) b[k] += d[k];                   \
        }                                                                   \
        sums[0] += sum_of_lanes(a);                                         \
        sums[1] += sum_of_lanes(b);                                         \
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
    PLANE_BY_TURNS
    double sum[PLANE_TURNS] = {0}, sums[PLANE_TURNS][2] = {{0, 0}};
    float middle[PLANE_TURNS], scale[PLANE_TURNS];
    FOR_PLANES sum[t] += plane_sum(x + at, plane);
    FOR_TURNS middle[t] = (float)(sum[t] / (double)n);
    FOR_PLANES distance_sums(sums[t], x + at, middle[t], plane);
    FOR_TURNS {
        double rest = sums[t][0] / (double)n, square = sums[t][1] / (double)n - rest * rest;
        mean[c] = middle[t] = middle[t] + (float)rest;
        var[c] = (float)(square < 0 ? 0 : square);
        scale[t] = scale_of(gamma[c], var[c], eps);
    }
    FOR_PLANES normalize_plane(y + at, x + at, middle[t], scale[t], beta[first + t], plane);
})

FLOAT_LOOP(apply_to_planes, OUT(0, y) IN(1, x) IN(2, gamma) IN(3, beta) IN(4, mean) IN(5, var), PLANES, {
    PLANE_BY_TURNS
    float scale[PLANE_TURNS];
    FOR_TURNS scale[t] = scale_of(gamma[c], var[c], eps);
    FOR_PLANES normalize_plane(y + at, x + at, mean[first + t], scale[t], beta[first + t], plane);
})

INSIDE void plane_gradient(float *restrict gx, const float *restrict x, const float *restrict gy, float middle, float scale,
                           float less, float slope, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = scale * ((gy[j] - less) - (x[j] - middle) * slope);
}

/* gx = gamma / s (gy - sum gy / n - x_hat sum(gy x_hat) / n), s the root of var + eps */
FLOAT_LOOP(normalize_planes_backward,
           OUT(0, gx) OUT(1, ggamma) OUT(2, gbeta) IN(3, x) IN(4, gy) IN(5, gamma) IN(6, mean) IN(7, var), PLANES, {
    PLANE_BY_TURNS
    double sums[PLANE_TURNS][2] = {{0, 0}};
    float scale[PLANE_TURNS], less[PLANE_TURNS], slope[PLANE_TURNS];
    FOR_PLANES slope_sums(sums[t], gy + at, x + at, mean[first + t], plane);
    FOR_TURNS {
        double inverse = 1 / sqrt((double)var[c] + eps);
        ggamma[c] = (float)(sums[t][1] * inverse);
        gbeta[c] = (float)sums[t][0];
        less[t] = (float)(sums[t][0] / (double)n);
        slope[t] = (float)(sums[t][1] * inverse * inverse / (double)n);
        scale[t] = (float)(gamma[c] * inverse);
    }
    FOR_PLANES plane_gradient(gx + at, x + at, gy + at, mean[first + t], scale[t], less[t], slope[t], plane);
})

/* ---- group normalization of the same images, or of rows (HW 1): i counts the groups of all images, whose channels lie one
after another. numbers: n elements of a group, C, HW, eps */

#define GROUPS                                    \
    PLANES                                        \
    const ptrdiff_t count = n / plane;            \
    const ptrdiff_t num_groups = channels / count;

INSIDE void normalize_row(float *restrict y, const float *restrict x, const float *restrict gamma,
                          const float *restrict beta, float middle, float scale, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = (x[j] - middle) * (scale * gamma[j]) + beta[j];
}

FLOAT_LOOP(normalize_groups, OUT(0, y) OUT(1, mean) OUT(2, var) IN(3, x) IN(4, gamma) IN(5, beta), GROUPS, {
    const ptrdiff_t start = i * n, channel = i % num_groups * count;
    double sums[2] = {0, 0};
    float middle = (float)(plane_sum(x + start, n) / (double)n);
    distance_sums(sums, x + start, middle, n);
    double rest = sums[0] / (double)n, square = sums[1] / (double)n - rest * rest;
    mean[i] = middle = middle + (float)rest;
    var[i] = (float)(square < 0 ? 0 : square);
    float scale = scale_of(1.0f, var[i], eps);
    if (plane == 1) normalize_row(y + start, x + start, gamma + channel, beta + channel, middle, scale, n);
    for (ptrdiff_t c = 0, at = start; plane > 1 && c < count; ++c, at += plane)
        normalize_plane(y + at, x + at, middle, scale * gamma[channel + c], beta[channel + c], plane);
})

INSIDE void weighted_slope_sums(double *sums, const float *restrict gy, const float *restrict gamma,
                                const float *restrict x, float middle, ptrdiff_t n) {
    TWO_SUMS(gy[j] * gamma[j], x[j] - middle)
}

INSIDE void row_gradient(float *restrict gx, float *restrict ggamma, const float *restrict x, const float *restrict gy,
                         const float *restrict gamma, float middle, float scale, float less, float slope, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        float distance = x[j] - middle;
        ggamma[j] = gy[j] * (distance * scale);
        gx[j] = scale * ((gamma[j] * gy[j] - less) - distance * slope);
    }
}

INSIDE void group_gradient(float *restrict gx, const float *restrict x, const float *restrict gy, float gamma, float middle,
                           float scale, float less, float slope, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = scale * ((gamma * gy[j] - less) - (x[j] - middle) * slope);
}

/* With g = gamma gy, gx = (g - sum g / n - x_hat sum(g x_hat) / n) / s. Of gamma and beta the terms of each image, which are
to be added; those of beta are gy where HW is 1, and are not written. */
FLOAT_LOOP(normalize_groups_backward,
           OUT(0, gx) OUT(1, ggamma) OUT(2, gbeta) IN(3, x) IN(4, gy) IN(5, mean) IN(6, var) IN(7, gamma), GROUPS, {
    const ptrdiff_t start = i * n, channel = i % num_groups * count;
    const float middle = mean[i];
    double whole[2] = {0, 0}, inverse = 1 / sqrt((double)var[i] + eps);
    if (plane == 1) weighted_slope_sums(whole, gy + start, gamma + channel, x + start, middle, n);
    for (ptrdiff_t c = 0, at = start; plane > 1 && c < count; ++c, at += plane) {
        double sums[2] = {0, 0};
        slope_sums(sums, gy + at, x + at, middle, plane);
        ggamma[i * count + c] = (float)(sums[1] * inverse);
        gbeta[i * count + c] = (float)sums[0];
        whole[0] += sums[0] * gamma[channel + c];
        whole[1] += sums[1] * gamma[channel + c];
    }
    float scale = (float)inverse, less = (float)(whole[0] / (double)n);
    float slope = (float)(whole[1] * inverse * inverse / (double)n);
    if (plane == 1) row_gradient(gx + start, ggamma + start, x + start, gy + start, gamma + channel, middle, scale, less, slope, n);
    for (ptrdiff_t c = 0, at = start; plane > 1 && c < count; ++c, at += plane)
        group_gradient(gx + at, x + at, gy + at, gamma[channel + c], middle, scale, less, slope, plane);
})
