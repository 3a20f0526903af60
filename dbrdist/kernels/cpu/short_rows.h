/* Short rows side by side. Included by row_loops.h. */

/* Rows of fewer than SHORT elements: GROUP of them side by side, element j of the r-th at j * GROUP + r, so that each has
the same result whatever is beside it. */
enum { GROUP = LANES, SHORT = 64 };
#define FOR_GROUP for (int r = 0; r < GROUP; ++r)

/* 8 rows of 8 as columns, in three steps of shuffles: a third of the time of moving each element. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#endif
#ifdef HAS_SHUFFLES
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
INSIDE void turn_8(float *restrict to, ptrdiff_t to_step, const float *restrict from, ptrdiff_t from_step) {
    Eight a[8], b[8];
    for (int r = 0; r < 8; ++r) a[r] = *(const Eight *)(from + r * from_step);
    for (int r = 0; r < 8; r += 2) {
        b[r] = __builtin_shufflevector(a[r], a[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[r + 1] = __builtin_shufflevector(a[r], a[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int r = 0; r < 8; r += 4)
        for (int k = 0; k < 2; ++k) {
            a[r + 2 * k] = __builtin_shufflevector(b[r + k], b[r + k + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[r + 2 * k + 1] = __builtin_shufflevector(b[r + k], b[r + k + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int r = 0; r < 4; ++r) {
        *(Eight *)(to + r * to_step) = __builtin_shufflevector(a[r], a[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(Eight *)(to + (r + 4) * to_step) = __builtin_shufflevector(a[r], a[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
INSIDE void turn_8(float *restrict to, ptrdiff_t to_step, const float *restrict from, ptrdiff_t from_step) {
    for (int r = 0; r < 8; ++r)
        for (int j = 0; j < 8; ++j) to[j * to_step + r] = from[r * from_step + j];
}
#endif

OUTSIDE void gather_rows(float *restrict to, const float *restrict x, ptrdiff_t count, const ptrdiff_t n) {
    ptrdiff_t whole = count == GROUP ? n - n % 8 : 0;
    if (count < GROUP)
        for (ptrdiff_t k = 0; k < n * GROUP; ++k) to[k] = 0.0f;
    for (ptrdiff_t r = 0; whole && r < GROUP; r += 8)
        for (ptrdiff_t j = 0; j < whole; j += 8) turn_8(to + j * GROUP + r, GROUP, x + r * n + j, n);
    for (ptrdiff_t r = 0; r < count; ++r)
        for (ptrdiff_t j = whole; j < n; ++j) to[j * GROUP + r] = x[r * n + j];
}

OUTSIDE void scatter_rows(float *restrict y, const float *restrict from, ptrdiff_t count, const ptrdiff_t n) {
    ptrdiff_t whole = count == GROUP ? n - n % 8 : 0;
    for (ptrdiff_t r = 0; whole && r < GROUP; r += 8)
        for (ptrdiff_t j = 0; j < whole; j += 8) turn_8(y + r * n + j, n, from + j * GROUP + r, GROUP);
    for (ptrdiff_t r = 0; r < count; ++r)
        for (ptrdiff_t j = whole; j < n; ++j) y[r * n + j] = from[j * GROUP + r];
}
