/* Rows of C values mixed four at a time: of places between pixels, whose channels lie together. i counts the images. numbers:
C times the places of an image, C times its pixels, C. For each image four rows of weights and of numbers of pixels, 32-bit
integers that stand in an array of float. Included by vector_loops.h, which says what the macros mean. Every sum has the
order of NumPy's formula, in which each of the four is an array of its own. */

enum { TAPS = 4 };
#define SAMPLING                                                                               \
    const ptrdiff_t width = (ptrdiff_t)numbers[2];                                             \
    const ptrdiff_t n = (ptrdiff_t)numbers[0];                                                 \
    const ptrdiff_t whole = (ptrdiff_t)numbers[1];                                             \
    const ptrdiff_t places = n / width;
#define PIXEL(k) ((ptrdiff_t)(int32_t)bits_of(number[(k) * places + p]) * width)

INSIDE void mix_rows(float *restrict y, const float *a, const float *b, const float *c, const float *d, const float *w,
                     ptrdiff_t places, ptrdiff_t width) {
    const float of_a = w[0], of_b = w[places], of_c = w[2 * places], of_d = w[3 * places];
    NOTHING_OVERLAPS
    for (ptrdiff_t j = 0; j < width; ++j) y[j] = d[j] * of_d + (c[j] * of_c + (b[j] * of_b + (a[j] * of_a + 0.0f)));
}

LOOP_OF_8(mix_pixels, OUT(0, to) IN(1, from) IN(2, weights) IN(3, numbers_of), SAMPLING, {
    const float *x = from + i * whole, *w = weights + i * TAPS * places, *number = numbers_of + i * TAPS * places;
    for (ptrdiff_t p = 0; p < places; ++p)
        mix_rows(to + i * n + p * width, x + PIXEL(0), x + PIXEL(1), x + PIXEL(2), x + PIXEL(3), w + p, places, width);
})

INSIDE void add_row(float *restrict y, const float *restrict x, float w, ptrdiff_t width) {
    NOTHING_OVERLAPS
    for (ptrdiff_t j = 0; j < width; ++j) y[j] = y[j] + x[j] * w;
}

INSIDE void add_all(float *restrict y, const float *restrict x, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = y[j] + x[j];
}

/* The transpose: values of places added to their pixels, those of one of the four after another, each in scratch before it is
added. The order is that of SpreadMixed in functions/sampling.py. */
static const int TAP_ORDER[TAPS] = {1, 2, 0, 3};
LOOP_OF_8(spread_pixels, OUT(0, to) OUT(1, scratch) IN(2, from) IN(3, weights) IN(4, numbers_of), SAMPLING, {
    const float *y = from + i * n, *w = weights + i * TAPS * places, *number = numbers_of + i * TAPS * places;
    for (int turn = 0; turn < TAPS; ++turn) {
        const int k = TAP_ORDER[turn];
        float *x = (turn ? scratch : to) + i * whole;
        memset(x, 0, (size_t)whole * sizeof(float));
        for (ptrdiff_t p = 0; p < places; ++p) add_row(x + PIXEL(k), y + p * width, w[k * places + p], width);
        if (turn) add_all(to + i * whole, x, whole);
    }
})

/* The gradient of each weight: the product of a place's values with those of a pixel. */
LOOP_OF_8(pixel_products, OUT(0, to) IN(1, from) IN(2, pixels) IN(3, numbers_of), SAMPLING, {
    const float *y = from + i * n, *x = pixels + i * whole, *number = numbers_of + i * TAPS * places;
    for (int k = 0; k < TAPS; ++k) {
        float *products = to + (i * TAPS + k) * places;
        if (width <= 128)
            for (ptrdiff_t p = 0; p < places; ++p) products[p] = 0.0f + short_dot(y + p * width, x + PIXEL(k), width);
        else
            for (ptrdiff_t p = 0; p < places; ++p) products[p] = 0.0f + pairwise_dot(y + p * width, x + PIXEL(k), width);
    }
})

/* Rows of numbers[1] elements mixed two elements at a time, to rows of n: their numbers, 32-bit integers that stand in arrays of
float, and the weight of the second, whose value counts for nothing where that is 0. i counts the rows. */
LOOP_OF_8(interpolate_rows, OUT(0, to) IN(1, from) IN(2, low) IN(3, high) IN(4, weight), ROW_LENGTH, {
    const float *restrict x = from + i * (ptrdiff_t)numbers[1];
    float *restrict y = to + i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) {
        float a = x[(int32_t)bits_of(low[j])], b = x[(int32_t)bits_of(high[j])], w = weight[j];
        y[j] = chosen(w == 0.0f, a, a * (1.0f - w) + b * w);
    }
})
