/* Products of rows and columns, in NumPy's order, and their gradients: i counts the rows or columns of n = numbers[0] elements.
Included by vector_loops.h after row_loops.h, which says what the macros mean. */

INSIDE void prod_along(float *restrict y, const float *restrict x, ptrdiff_t n, ptrdiff_t down, ptrdiff_t next, int turns) {
    float sofar[COLUMN_TURNS];
    for (int r = 0; r < turns; ++r) sofar[r] = x[AT(0, r)];
    for (ptrdiff_t j = 1; j < n; ++j)
        for (int r = 0; r < turns; ++r) sofar[r] = sofar[r] * x[AT(j, r)];
    for (int r = 0; r < turns; ++r) y[r] = sofar[r];
}

/* TILE rows at once as columns of a tile: a product that leaves the normal numbers takes a hundred cycles, for one of them or a
vector. */
enum { TILE = 16 };
#define FOR_TILE for (int r = 0; r < TILE; ++r)
INSIDE void turn_in(float *restrict tile, const float *restrict x, ptrdiff_t n, ptrdiff_t count) {
    for (ptrdiff_t j = 0; j < count; ++j) FOR_TILE tile[j * TILE + r] = x[r * n + j];
}

INSIDE void prod_by_tiles(float *restrict y, const float *restrict x, ptrdiff_t n) {
    float tile[TILE * TILE], sofar[TILE];
    FOR_TILE sofar[r] = 1.0f;
    for (ptrdiff_t first = 0; first < n; first += TILE) {
        ptrdiff_t count = n - first < TILE ? n - first : TILE;
        turn_in(tile, x + first, n, count);
        for (ptrdiff_t j = 0; j < count; ++j) FOR_TILE sofar[r] = sofar[r] * tile[j * TILE + r];
    }
    FOR_TILE y[r] = sofar[r];
}

FLOAT_LOOP(prod_of_rows, OUT(0, y) IN(1, x), LENGTH, {
    if (stop - i >= TILE) {
        prod_by_tiles(y + i, x + i * n, n);
        i += TILE - 1;
    } else {
        BY_TURNS(ROW_TURNS, prod_along, y + i, x + i * n, n, 1, n)
    }
})
LOOP_OF_8(prod_of_columns, OUT(0, y) IN(1, x), LENGTH_AND_WIDTH,
          BY_TURNS(COLUMN_TURNS, prod_along, y + i, x + i, n, width, 1))

/* gy times the product of all others: of those before, then of those behind */
INSIDE void prod_backward_along(float *restrict gx, const float *restrict x, const float *restrict gy, ptrdiff_t n,
                                ptrdiff_t down, ptrdiff_t next, int turns) {
    float sofar[COLUMN_TURNS];
    for (int r = 0; r < turns; ++r) sofar[r] = 1.0f;
    for (ptrdiff_t j = 0; j < n; ++j)
        for (int r = 0; r < turns; ++r) {
            gx[AT(j, r)] = sofar[r];
            sofar[r] = sofar[r] * x[AT(j, r)];
        }
    for (int r = 0; r < turns; ++r) sofar[r] = 1.0f;
    for (ptrdiff_t j = n - 1; j >= 0; --j)
        for (int r = 0; r < turns; ++r) {
            gx[AT(j, r)] = (gx[AT(j, r)] * sofar[r]) * gy[r];
            sofar[r] = sofar[r] * x[AT(j, r)];
        }
}

LOOP_OF_8(prod_of_rows_backward, OUT(0, gx) IN(1, x) IN(2, gy), LENGTH,
          BY_TURNS(ROW_TURNS, prod_backward_along, gx + i * n, x + i * n, gy + i, n, 1, n))
LOOP_OF_8(prod_of_columns_backward, OUT(0, gx) IN(1, x) IN(2, gy), LENGTH_AND_WIDTH,
          BY_TURNS(COLUMN_TURNS, prod_backward_along, gx + i, x + i, gy + i, n, width, 1))
