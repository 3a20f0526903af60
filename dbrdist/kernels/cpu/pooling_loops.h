/* The largest element of each window along an axis, and its gradient: i counts what comes before the axis. numbers: elements of
the windows, and of the axis, with all that comes after it; that alone; length, step and padding of the windows. The place of an
element in its window is a 32-bit integer, which stands in an array of float. Included by vector_loops.h, which says what the
macros mean. */

#define WINDOWS                                        \
    const ptrdiff_t n = (ptrdiff_t)numbers[0];         \
    const ptrdiff_t whole = (ptrdiff_t)numbers[1];     \
    const ptrdiff_t inner = (ptrdiff_t)numbers[2];     \
    const ptrdiff_t length = (ptrdiff_t)numbers[3];    \
    const ptrdiff_t step = (ptrdiff_t)numbers[4];      \
    const ptrdiff_t padding = (ptrdiff_t)numbers[5];   \
    const int are_pairs = inner == 1 && length == 2 && step == 2 && padding == 0 && whole == 2 * n;
#define FOR_WINDOWS                                                                              \
    for (ptrdiff_t at = 0, start = -padding; at < n; at += inner, start += step)
#define FIRST_PLACE (start < 0 ? -start : 0)
#define END_PLACE (whole / inner - start < length ? whole / inner - start : length)
#define IS_BETTER(x, y) (((x) > (y)) | (((x) != (x)) & ((y) == (y)))) /* NaN is the largest */
#define PLACE(u) float_of((uint32_t)(u))

INSIDE void larger_of_pairs(float *restrict y, float *restrict place, const float *restrict x, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        int second = IS_BETTER(x[2 * j + 1], x[2 * j]);
        y[j] = chosen(second, x[2 * j + 1], x[2 * j]);
        place[j] = chosen(second, PLACE(1), PLACE(0));
    }
}

INSIDE void take_first(float *restrict y, float *restrict place, const float *restrict x, ptrdiff_t u, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        y[j] = x[j];
        place[j] = PLACE(u);
    }
}

INSIDE void take_larger(float *restrict y, float *restrict place, const float *restrict x, ptrdiff_t u, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        int is_better = IS_BETTER(x[j], y[j]);
        y[j] = chosen(is_better, x[j], y[j]);
        place[j] = chosen(is_better, PLACE(u), place[j]);
    }
}

LOOP_OF_8(largest_along, OUT(0, to) OUT(1, places) IN(2, from), WINDOWS, {
    if (are_pairs) {
        larger_of_pairs(to + i * n, places + i * n, from + i * whole, (stop - i) * n);
        i = stop - 1;
        continue;
    }
    FOR_WINDOWS {
        float *y = to + i * n + at;
        float *place = places + i * n + at;
        const float *x = from + i * whole + start * inner;
        ptrdiff_t u = FIRST_PLACE;
        take_first(y, place, x + u * inner, u, inner);
        for (++u; u < END_PLACE; ++u) take_larger(y, place, x + u * inner, u, inner);
    }
})

INSIDE void spread_pairs(float *restrict y, const float *restrict place, const float *restrict x, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) {
        int is_first = bits_of(place[j]) == 0;
        y[2 * j] = chosen(is_first, x[j], 0.0f) + 0.0f;
        y[2 * j + 1] = chosen(is_first, 0.0f, x[j]) + 0.0f;
    }
}

INSIDE void add_chosen(float *restrict y, const float *restrict place, const float *restrict x, ptrdiff_t u, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = y[j] + chosen(bits_of(place[j]) == (uint32_t)u, x[j], 0.0f);
}

/* The places in their order: where windows overlap, that of NumPy's sums. */
LOOP_OF_8(spread_along, OUT(0, to) IN(1, places) IN(2, from), WINDOWS, {
    if (are_pairs) {
        spread_pairs(to + i * whole, places + i * n, from + i * n, (stop - i) * n);
        i = stop - 1;
        continue;
    }
    memset(to + i * whole, 0, (size_t)whole * sizeof(float));
    for (ptrdiff_t u = 0; u < length; ++u)
        FOR_WINDOWS {
            if (u >= FIRST_PLACE && u < END_PLACE)
                add_chosen(to + i * whole + (start + u) * inner, places + i * n + at, from + i * n + at, u, inner);
        }
})
