/* Loops over rows of n = numbers[0] elements: i counts the rows. Included by vector_loops.h, which says what the macros
mean. Where NumPy adds or multiplies one element after another, several rows take turns, so that no step waits for the one
before. */

enum { LANES = 32 }; /* a sum is one of so many parts, whatever the processor; fewer would be no loop, but steps one by one */

/* one of all lanes, half of them at a time */
#define HALVED(k, ...)                               \
    for (int half = LANES / 2; half > 0; half /= 2)  \
        for (int k = 0; k < half; ++k) { __VA_ARGS__ }

INSIDE double sum_of_lanes(const float *restrict lanes) {
    double wide[LANES];
    for (int k = 0; k < LANES; ++k) wide[k] = lanes[k];
    HALVED(k, wide[k] += wide[k + half];)
    return wide[0];
}

INSIDE float row_max(const float *restrict x, ptrdiff_t n, ptrdiff_t whole) {
    float lanes[LANES], largest = -INFINITY;
    for (int k = 0; k < LANES; ++k) lanes[k] = -INFINITY;
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        for (int k = 0; k < LANES; ++k) lanes[k] = LARGER(x[j + k], lanes[k]);
    for (ptrdiff_t j = whole; j < n; ++j) largest = LARGER(x[j], largest);
    HALVED(k, lanes[k] = LARGER(lanes[k + half], lanes[k]);)
    return LARGER(lanes[0], largest);
}

INSIDE float row_sum(const float *restrict x, ptrdiff_t n, ptrdiff_t whole) {
    float lanes[LANES] = {0};
    double sum = 0;
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        for (int k = 0; k < LANES; ++k) lanes[k] += x[j + k];
    for (ptrdiff_t j = whole; j < n; ++j) sum += x[j];
    return (float)(sum + sum_of_lanes(lanes));
}

/* the sum of y[j] for all j, each computed first; the same sums as row_sum's */
#define EACH_AND_SUM(y, ...)                                                       \
    float lanes[LANES] = {0};                                                      \
    double wide = 0;                                                               \
    for (ptrdiff_t first = 0; first < whole; first += LANES)                       \
        for (int k = 0; k < LANES; ++k) {                                          \
            const ptrdiff_t j = first + k;                                         \
            __VA_ARGS__                                                            \
            lanes[k] += y;                                                         \
        }                                                                          \
    for (ptrdiff_t j = whole; j < n; ++j) {                                        \
        __VA_ARGS__                                                                \
        wide += y;                                                                 \
    }                                                                              \
    float sum = (float)(wide + sum_of_lanes(lanes));

#include "short_rows.h"

/* powers of the elements less the largest of their row, which is subtracted from x; and their sums */
INSIDE void exp_of_group(float *restrict powers, float *restrict x, double *restrict sums, const ptrdiff_t n) {
    float largest[GROUP];
    FOR_GROUP largest[r] = -INFINITY;
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP largest[r] = LARGER(x[j * GROUP + r], largest[r]);
    FOR_GROUP sums[r] = 0;
    for (ptrdiff_t j = 0; j < n; ++j)
        FOR_GROUP {
            float below = x[j * GROUP + r] - largest[r];
            float power = exp_of(below);
            x[j * GROUP + r] = below;
            powers[j * GROUP + r] = power;
            sums[r] += power;
        }
}

/* Sums of powers below NEAR_ONE are of one large term, 1, and the others are added alone: 1 + 1e-9 is 1 in float32. */
#define NEAR_ONE 1.25f
#define LOG_OF_SUM(sum, others) (float)wide_chosen((sum) < NEAR_ONE, wide_log1p(others), wide_log(sum))

INSIDE void log_softmax_of_group(float *restrict y, const float *restrict from, ptrdiff_t count, const ptrdiff_t n) {
    float x[SHORT * GROUP], powers[SHORT * GROUP], log_of_sum[GROUP];
    double sums[GROUP], others[GROUP];
    gather_rows(x, from, count, n);
    exp_of_group(powers, x, sums, n);
    FOR_GROUP others[r] = 0;
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP others[r] += powers[j * GROUP + r] < 1.0f ? powers[j * GROUP + r] : 0.0f;
    FOR_GROUP {
        float sum = (float)sums[r], log = LOG_OF_SUM(sum, others[r]);
        log_of_sum[r] = sum == sum ? log : sum;
    }
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP x[j * GROUP + r] -= log_of_sum[r];
    scatter_rows(y, x, count, n);
}

INSIDE void softmax_of_group(float *restrict y, const float *restrict from, ptrdiff_t count, const ptrdiff_t n) {
    float x[SHORT * GROUP], powers[SHORT * GROUP], share[GROUP];
    double sums[GROUP];
    gather_rows(x, from, count, n);
    exp_of_group(powers, x, sums, n);
    FOR_GROUP share[r] = 1.0f / (float)sums[r];
    for (ptrdiff_t j = 0; j < n; ++j) FOR_GROUP powers[j * GROUP + r] *= share[r];
    scatter_rows(y, powers, count, n);
}

/* Of each row the sum of ELEMENT. */
#define GROUP_SUMS(sums, ELEMENT)                             \
    float sums[GROUP];                                        \
    double wide[GROUP];                                       \
    FOR_GROUP wide[r] = 0;                                    \
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP)          \
        FOR_GROUP wide[r] += ELEMENT;                         \
    FOR_GROUP sums[r] = (float)wide[r];

INSIDE void log_softmax_backward_of_group(float *restrict gx, const float *restrict y, const float *restrict gy,
                                          ptrdiff_t count, const ptrdiff_t n) {
    float a[SHORT * GROUP], b[SHORT * GROUP];
    gather_rows(a, y, count, n);
    gather_rows(b, gy, count, n);
    GROUP_SUMS(sums, b[k + r])
    for (ptrdiff_t k = 0; k < n * GROUP; ++k) a[k] = exp_of(a[k]); /* apart: within the next it would be no vectors */
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP)
        FOR_GROUP a[k + r] = b[k + r] - a[k + r] * sums[r];
    scatter_rows(gx, a, count, n);
}

INSIDE void softmax_backward_of_group(float *restrict gx, const float *restrict y, const float *restrict gy,
                                      ptrdiff_t count, const ptrdiff_t n) {
    float a[SHORT * GROUP], b[SHORT * GROUP];
    gather_rows(a, y, count, n);
    gather_rows(b, gy, count, n);
    GROUP_SUMS(sums, a[k + r] * b[k + r])
    for (ptrdiff_t k = 0; k < n * GROUP; k += GROUP)
        FOR_GROUP a[k + r] = a[k + r] * (b[k + r] - sums[r]);
    scatter_rows(gx, a, count, n);
}

/* All rows from i to stop if they are short, in one call: another for a whole group would compile all twice. */
#define IF_SHORT(f, ...)                                                                           \
    if (n < SHORT) {                                                                               \
        for (; i < stop; i += GROUP) f(__VA_ARGS__, stop - i < GROUP ? stop - i : GROUP, n);       \
        i = stop - 1;                                                                              \
        continue;                                                                                  \
    }

#define ROW_LENGTH const ptrdiff_t n = (ptrdiff_t)numbers[0]; const ptrdiff_t whole = n - n % LANES;

FLOAT_LOOP(log_softmax, OUT(0, to) IN(1, from), ROW_LENGTH, {
    IF_SHORT(log_softmax_of_group, to + i * n, from + i * n)
    const float *restrict x = from + i * n;
    float *restrict y = to + i * n;
    float largest = row_max(x, n, whole);
    EACH_AND_SUM(power, float power = exp_of(x[j] - largest);)
    double others = 0;
    if (sum < NEAR_ONE)
        for (ptrdiff_t j = 0; j < n; ++j) {
            float power = exp_of(x[j] - largest);
            others += power < 1.0f ? power : 0.0f;
        }
    float log_of_sum = LOG_OF_SUM(sum, others);
    log_of_sum = sum == sum ? log_of_sum : sum;
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = (x[j] - largest) - log_of_sum;
})

FLOAT_LOOP(log_softmax_backward, OUT(0, to) IN(1, of_y) IN(2, of_gy), ROW_LENGTH, {
    IF_SHORT(log_softmax_backward_of_group, to + i * n, of_y + i * n, of_gy + i * n)
    const float *restrict y = of_y + i * n;
    const float *restrict gy = of_gy + i * n;
    float *restrict gx = to + i * n;
    float sum = row_sum(gy, n, whole);
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = gy[j] - exp_of(y[j]) * sum;
})

FLOAT_LOOP(softmax, OUT(0, to) IN(1, from), ROW_LENGTH, {
    IF_SHORT(softmax_of_group, to + i * n, from + i * n)
    const float *restrict x = from + i * n;
    float *restrict y = to + i * n;
    float largest = row_max(x, n, whole);
    EACH_AND_SUM(power, float power = exp_of(x[j] - largest); y[j] = power;)
    float share = 1.0f / sum;
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = y[j] * share;
})

FLOAT_LOOP(softmax_backward, OUT(0, to) IN(1, of_y) IN(2, of_gy), ROW_LENGTH, {
    IF_SHORT(softmax_backward_of_group, to + i * n, of_y + i * n, of_gy + i * n)
    const float *restrict y = of_y + i * n;
    const float *restrict gy = of_gy + i * n;
    float *restrict gx = to + i * n;
    EACH_AND_SUM(product, float product = y[j] * gy[j];)
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = y[j] * (gy[j] - sum);
})

/* ---- a row beside each row, and a number beside each row's elements */

#define BESIDE(name, op)                                                                         \
    FLOAT_LOOP(name##_row, OUT(0, to) IN(1, from) IN(2, row), ROW_LENGTH, {                      \
        const float *restrict x = from + i * n;                                                  \
        float *restrict y = to + i * n;                                                          \
        (void)whole;                                                                             \
        for (ptrdiff_t j = 0; j < n; ++j) y[j] = x[j] op row[j];                                 \
    })                                                                                           \
    FLOAT_LOOP(name##_column, OUT(0, to) IN(1, from) IN(2, column), ROW_LENGTH, {                \
        const float *restrict x = from + i * n;                                                  \
        float *restrict y = to + i * n;                                                          \
        const float value = column[i];                                                           \
        (void)whole;                                                                             \
        for (ptrdiff_t j = 0; j < n; ++j) y[j] = x[j] op value;                                  \
    })
BESIDE(add, +)
BESIDE(mul, *)

/* ---- x times sigmoid(beta x), beta a row */

FLOAT_LOOP(swish_rows, OUT(0, to) IN(1, from) IN(2, beta), ROW_LENGTH, {
    const float *restrict x = from + i * n;
    float *restrict y = to + i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = x[j] * sigmoid_of(x[j] * beta[j]);
})

/* and x times e, whose sum over the rows is the gradient of beta, e = gy x s (1 - s) */
FLOAT_LOOP(swish_rows_backward, OUT(0, to) OUT(1, to_xe) IN(2, from) IN(3, of_gy) IN(4, beta), ROW_LENGTH, {
    const float *restrict x = from + i * n;
    const float *restrict gy = of_gy + i * n;
    float *restrict gx = to + i * n;
    float *restrict xe = to_xe + i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) {
        float s = sigmoid_of(x[j] * beta[j]), e = gy[j] * s * (1.0f - s) * x[j];
        gx[j] = gy[j] * s + e * beta[j];
        xe[j] = e * x[j];
    }
})

/* ---- normalization with given statistics: the gradient of x, and the sums of gy and gy (x - mean) over the rows, of which
there are numbers[2] parts, numbers[3] of them in turns, in the order of sum_of_many_rows in core/array/sums.py */

/* Of one row, or of four that belong to one part and lie by ``next`` apart: where rows start anywhere in a line of the cache,
four take 0.7 of the time. */
INSIDE void fixed_rows(float *restrict gx, float *restrict sums, float *restrict term_sums, const float *restrict x,
                       const float *restrict gy, const float *restrict mean, const float *restrict scale, ptrdiff_t width,
                       ptrdiff_t next, const int count) {
    NOTHING_OVERLAPS
    for (ptrdiff_t j = 0; j < width; ++j) {
        float center = mean[j], factor = scale[j], sum = sums[j], term_sum = term_sums[j];
        for (int r = 0; r < count; ++r) {
            const ptrdiff_t at = r * next + j;
            sum = sum + gy[at];
            term_sum = term_sum + gy[at] * (x[at] - center);
            gx[at] = gy[at] * factor;
        }
        sums[j] = sum;
        term_sums[j] = term_sum;
    }
}

#define FIXED_ROWS(r, part, count)                                                                                     \
    fixed_rows(gx + (r) * width + i, sums + (part) * width + i, term_sums + (part) * width + i, x + (r) * width + i,   \
               gy + (r) * width + i, mean + i, scale + i, stop - i, turns * width, count);

LOOP_OF_8(fixed_normalization_backward,
          OUT(0, gx) OUT(1, sums) OUT(2, term_sums) IN(3, x) IN(4, gy) IN(5, mean) IN(6, scale),
          const ptrdiff_t n = (ptrdiff_t)numbers[0]; const ptrdiff_t width = (ptrdiff_t)numbers[1];
          const ptrdiff_t parts = (ptrdiff_t)numbers[2]; const ptrdiff_t turns = (ptrdiff_t)numbers[3];, {
    const ptrdiff_t each = n / parts * turns; /* rows of the parts that take turns */
    for (ptrdiff_t part = 0; part < parts; ++part) {
        memset(sums + part * width + i, 0, (size_t)(stop - i) * sizeof(float));
        memset(term_sums + part * width + i, 0, (size_t)(stop - i) * sizeof(float));
    }
    const ptrdiff_t whole = n / parts * parts;
    for (ptrdiff_t r = 0; r < n;) {
        const ptrdiff_t part = r / each * turns;
        if (r % turns == 0 && r < whole && r % each + 4 * turns <= each) {
            for (ptrdiff_t turn = 0; turn < turns; ++turn, ++r) FIXED_ROWS(r, part + turn, 4)
            r += 3 * turns;
        } else {
            FIXED_ROWS(r, r < whole ? part + r % turns : r - whole, 1)
            ++r;
        }
    }
    i = stop - 1;
})

FLOAT_LOOP(fill_rows, OUT(0, to) IN(1, values), ROW_LENGTH, {
    const float value = values[i];
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) to[i * n + j] = value;
})

/* ---- ReLUs whose output is known by a bit for each element: rows are of LANES elements, the first of the lowest bit */

#define FOR_MARKS(...) for (int k = 0; k < LANES; ++k) { __VA_ARGS__ }
#define MARKED(value) ((bits >> k & 1) ? (value) : copysignf(0.0f, value))
#define ROW_OF_MARKS                              \
    const ptrdiff_t first = i * LANES;            \
    uint32_t bits;                                \
    memcpy(&bits, marks + i, sizeof bits);

FLOAT_LOOP(relu_of_sum_marked, OUT(0, a) OUT(1, marks) IN(2, b), , {
    float *restrict y = a + i * LANES;
    const float *restrict added = b + i * LANES;
    uint32_t bits = 0;
    FOR_MARKS(float sum = y[k] + added[k]; y[k] = RECTIFIED(sum);)
    FOR_MARKS(bits |= (uint32_t)(y[k] != 0) << k;)
    memcpy(marks + i, &bits, sizeof bits);
})

FLOAT_LOOP(relu_backward_marked, OUT(0, gx) IN(1, marks) IN(2, gy), , {
    ROW_OF_MARKS
    FOR_MARKS(gx[first + k] = MARKED(gy[first + k]);)
})

FLOAT_LOOP(relu_backward_marked_over, OUT(0, gy) IN(1, marks), , {
    ROW_OF_MARKS
    FOR_MARKS(gy[first + k] = MARKED(gy[first + k]);)
})

FLOAT_LOOP(relu_backward_of_sum_marked, OUT(0, gx) IN(1, marks) IN(2, a) IN(3, b), , {
    ROW_OF_MARKS
    FOR_MARKS(float sum = a[first + k] + b[first + k]; gx[first + k] = MARKED(sum);)
})

FLOAT_LOOP(relu_backward_of_sum_marked_over, OUT(0, a) IN(1, marks) IN(2, b), , {
    ROW_OF_MARKS
    FOR_MARKS(float sum = a[first + k] + b[first + k]; a[first + k] = MARKED(sum);)
})

/* ---- the rectified sum of normalized rows and others: vectors are the means, factors and offsets of all columns.
oneDNN's normalization with given statistics rounds so. */

#define NORMALIZED(x, of) fmaf((x) - (of)[j], (of)[n + j], (of)[2 * n + j])

FLOAT_LOOP(rectified_sum, OUT(0, y) IN(1, x) IN(2, vectors) IN(3, added), ROW_LENGTH, {
    const ptrdiff_t first = i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) {
        float sum = NORMALIZED(x[first + j], vectors) + added[first + j];
        y[first + j] = RECTIFIED(sum);
    }
})

FLOAT_LOOP(rectified_sum_of_two, OUT(0, y) IN(1, x) IN(2, vectors) IN(3, added) IN(4, others), ROW_LENGTH, {
    const ptrdiff_t first = i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) {
        float sum = NORMALIZED(x[first + j], vectors) + NORMALIZED(added[first + j], others);
        y[first + j] = RECTIFIED(sum);
    }
})

/* ---- both halves of a CReLU */

LOOP_OF_8(crelu, OUT(0, to) IN(1, from), ROW_LENGTH, {
    const float *restrict x = from + i * n;
    float *restrict above = to + 2 * i * n;
    float *restrict below = above + n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) {
        float v = x[j], negative = 0.0f - v;
        above[j] = v > 0.0f || v != v ? v : 0.0f;
        below[j] = negative > 0.0f || negative != negative ? negative : 0.0f;
    }
})

LOOP_OF_8(crelu_backward, OUT(0, to) IN(1, of_y) IN(2, of_gy), ROW_LENGTH, {
    typedef float Real;
    const float *restrict y = of_y + 2 * i * n;
    const float *restrict gy = of_gy + 2 * i * n;
    float *restrict gx = to + i * n;
    (void)whole;
    for (ptrdiff_t j = 0; j < n; ++j) gx[j] = PASSED(y[j], gy[j]) - PASSED(y[j + n], gy[j + n]);
})

/* ---- the largest or smallest of a row; NaN where there is one */

/* Rows from i to stop of a few elements: where the compiler knows how many, it turns several rows into vectors. */
#define WITH_KNOWN_LENGTH(f, ...)                      \
    if (n < LANES) {                                   \
        if (n == 2) f(__VA_ARGS__, i, stop, 2);        \
        else if (n == 4) f(__VA_ARGS__, i, stop, 4);   \
        else if (n == 8) f(__VA_ARGS__, i, stop, 8);   \
        else if (n == 16) f(__VA_ARGS__, i, stop, 16); \
        else f(__VA_ARGS__, i, stop, n);               \
        i = stop - 1;                                  \
    }
#define OF_SHORT_ROWS(name, choose)                                                                                  \
    INSIDE void name(float *restrict y, const float *restrict x, ptrdiff_t start, ptrdiff_t stop, const ptrdiff_t n) { \
        for (ptrdiff_t i = start; i < stop; ++i) {                                                                   \
            float chosen = x[i * n];                                                                                 \
            for (ptrdiff_t j = 1; j < n; ++j) chosen = choose(x[i * n + j], chosen);                                 \
            y[i] = chosen;                                                                                           \
        }                                                                                                            \
    }
OF_SHORT_ROWS(max_of_short_rows, LARGER)
OF_SHORT_ROWS(min_of_short_rows, SMALLER)

#define IS_SAME(x, y) (((x) == (y)) | (((x) != (x)) & ((y) != (y))))
INSIDE void passed_by_short_rows(float *restrict gx, const float *restrict x, const float *restrict y,
                                 const float *restrict gy, ptrdiff_t start, ptrdiff_t stop, const ptrdiff_t n) {
    for (ptrdiff_t i = start; i < stop; ++i)
        for (ptrdiff_t j = 0; j < n; ++j) gx[i * n + j] = IS_SAME(x[i * n + j], y[i]) ? gy[i] : 0.0f;
}

INSIDE float row_min(const float *restrict x, ptrdiff_t n, ptrdiff_t whole) {
    float lanes[LANES], smallest = INFINITY;
    for (int k = 0; k < LANES; ++k) lanes[k] = INFINITY;
    for (ptrdiff_t j = 0; j < whole; j += LANES)
        for (int k = 0; k < LANES; ++k) lanes[k] = SMALLER(x[j + k], lanes[k]);
    for (ptrdiff_t j = whole; j < n; ++j) smallest = SMALLER(x[j], smallest);
    HALVED(k, lanes[k] = SMALLER(lanes[k + half], lanes[k]);)
    return SMALLER(lanes[0], smallest);
}

LOOP_OF_8(max_of_rows, OUT(0, to) IN(1, from), ROW_LENGTH, {
    WITH_KNOWN_LENGTH(max_of_short_rows, to, from)
    else to[i] = row_max(from + i * n, n, whole);
})

LOOP_OF_8(min_of_rows, OUT(0, to) IN(1, from), ROW_LENGTH, {
    WITH_KNOWN_LENGTH(min_of_short_rows, to, from)
    else to[i] = row_min(from + i * n, n, whole);
})

/* gy for each element that equals y, as NaN equals NaN */
LOOP_OF_8(extremum_backward, OUT(0, to) IN(1, from) IN(2, of_y) IN(3, of_gy), ROW_LENGTH, {
    (void)whole;
    WITH_KNOWN_LENGTH(passed_by_short_rows, to, from, of_y, of_gy)
    else {
        const float *restrict x = from + i * n;
        float *restrict gx = to + i * n;
        float y = of_y[i], gy = of_gy[i];
        for (ptrdiff_t j = 0; j < n; ++j) gx[j] = IS_SAME(x[j], y) ? gy : 0.0f;
    }
})

/* ---- sums and products of what comes before, or after where step is -1 and not 1. They run along rows, several of which
take turns, or down columns: element j of the r-th of them lies at j * down + r * next. Columns are those of matrices of the
width numbers[3], one after another. */

enum { ROW_TURNS = 4, COLUMN_TURNS = 64 };
#define AT(j, r) ((j) * down + (r) * next)
#define BY_TURNS(turns, f, ...)                        \
    if (stop - i >= turns) {                           \
        f(__VA_ARGS__, turns);                         \
        i += turns - 1;                                \
    } else {                                           \
        f(__VA_ARGS__, 1);                             \
    }
#define LENGTH const ptrdiff_t n = (ptrdiff_t)numbers[0];
#define LENGTH_AND_WIDTH LENGTH const ptrdiff_t width = (ptrdiff_t)numbers[1];

#define CUMULATIVE(name, op)                                                                                     \
    INSIDE void name##_along(float *restrict y, const float *restrict x, ptrdiff_t n, ptrdiff_t down, ptrdiff_t next, \
                             ptrdiff_t step, int turns) {                                                        \
        float sofar[COLUMN_TURNS];                                                                               \
        ptrdiff_t j = step < 0 ? n - 1 : 0;                                                                      \
        for (int r = 0; r < turns; ++r) y[AT(j, r)] = sofar[r] = x[AT(j, r)];                                    \
        for (ptrdiff_t left = n - 1; left > 0; --left) {                                                         \
            j += step;                                                                                           \
            for (int r = 0; r < turns; ++r) y[AT(j, r)] = sofar[r] = sofar[r] op x[AT(j, r)];                    \
        }                                                                                                        \
    }                                                                                                            \
    LOOP_OF_8(name##_of_rows, OUT(0, y) IN(1, x), LENGTH const ptrdiff_t step = (ptrdiff_t)numbers[1];,          \
              BY_TURNS(ROW_TURNS, name##_along, y + i * n, x + i * n, n, 1, n, step))                            \
    LOOP_OF_8(name##_of_columns, OUT(0, y) IN(1, x),                                                             \
              LENGTH const ptrdiff_t step = (ptrdiff_t)numbers[2]; const ptrdiff_t width = (ptrdiff_t)numbers[3];, { \
        const ptrdiff_t column = i % width;                                                                      \
        const ptrdiff_t start_of = (i - column) * n + column;                                                    \
        if (stop - i >= COLUMN_TURNS && width - column >= COLUMN_TURNS) {                                        \
            name##_along(y + start_of, x + start_of, n, width, 1, step, COLUMN_TURNS);                           \
            i += COLUMN_TURNS - 1;                                                                               \
        } else {                                                                                                 \
            name##_along(y + start_of, x + start_of, n, width, 1, step, 1);                                      \
        }                                                                                                        \
    })

CUMULATIVE(cumsum, +)
CUMULATIVE(cumprod, *)

/* s_j = gy_j + x_{j+1} s_{j+1} times the product y before j */
INSIDE void cumprod_backward_along(float *restrict gx, const float *restrict x, const float *restrict y,
                                   const float *restrict gy, ptrdiff_t n, ptrdiff_t down, ptrdiff_t next, int turns) {
    float sofar[COLUMN_TURNS];
    for (int r = 0; r < turns; ++r) {
        sofar[r] = gy[AT(n - 1, r)];
        gx[AT(n - 1, r)] = n > 1 ? y[AT(n - 2, r)] * sofar[r] : sofar[r];
    }
    for (ptrdiff_t j = n - 2; j > 0; --j)
        for (int r = 0; r < turns; ++r) {
            sofar[r] = gy[AT(j, r)] + x[AT(j + 1, r)] * sofar[r];
            gx[AT(j, r)] = y[AT(j - 1, r)] * sofar[r];
        }
    for (int r = 0; n > 1 && r < turns; ++r) gx[AT(0, r)] = gy[AT(0, r)] + x[AT(1, r)] * sofar[r];
}

LOOP_OF_8(cumprod_of_rows_backward, OUT(0, gx) IN(1, x) IN(2, y) IN(3, gy), LENGTH,
          BY_TURNS(ROW_TURNS, cumprod_backward_along, gx + i * n, x + i * n, y + i * n, gy + i * n, n, 1, n))
LOOP_OF_8(cumprod_of_columns_backward, OUT(0, gx) IN(1, x) IN(2, y) IN(3, gy), LENGTH_AND_WIDTH,
          BY_TURNS(COLUMN_TURNS, cumprod_backward_along, gx + i, x + i, y + i, gy + i, n, width, 1))

/* In NumPy's order, one row after another. */
INSIDE void sum_along(float *restrict y, const float *restrict x, ptrdiff_t n, ptrdiff_t width, int turns) {
    float sofar[COLUMN_TURNS];
    for (int r = 0; r < turns; ++r) sofar[r] = 0.0f + x[r];
    for (ptrdiff_t j = 1; j < n; ++j)
        for (int r = 0; r < turns; ++r) sofar[r] = sofar[r] + x[j * width + r];
    for (int r = 0; r < turns; ++r) y[r] = sofar[r];
}

LOOP_OF_8(sum_of_columns, OUT(0, y) IN(1, x), LENGTH const ptrdiff_t width = (ptrdiff_t)numbers[2];, {
    const ptrdiff_t column = i % width;
    const float *restrict from = x + (i - column) * n + column;
    if (stop - i >= COLUMN_TURNS && width - column >= COLUMN_TURNS) {
        sum_along(y + i, from, n, width, COLUMN_TURNS);
        i += COLUMN_TURNS - 1;
    } else {
        sum_along(y + i, from, n, width, 1);
    }
})

/* ---- sums in NumPy's order: of up to 128 elements in 8 lanes, of more as the sum of two halves */

INSIDE ptrdiff_t first_half(ptrdiff_t n) { return n / 2 - n / 2 % 8; }

/* of ELEMENT(j), which PARAMETERS give; MOVE(n) moves them on. Within a short sum as well: an index would be multiplied for
each step, since Python has C compiled with numbers that wrap around, and the sum take 1.4 of the time. */
#define PAIRWISE(name, PARAMETERS, NAMES, MOVE, ELEMENT)                                                           \
    INSIDE float short_##name(PARAMETERS, const ptrdiff_t n) {                                                     \
        float lanes[8], sum = -0.0f;                                                                               \
        if (n >= 8) {                                                                                              \
            for (int k = 0; k < 8; ++k) lanes[k] = ELEMENT(k);                                                     \
            for (ptrdiff_t left = n / 8 - 1; left > 0; --left) {                                                   \
                MOVE(8)                                                                                            \
                for (int k = 0; k < 8; ++k) lanes[k] += ELEMENT(k);                                                \
            }                                                                                                      \
            MOVE(8)                                                                                                \
            sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])); \
        }                                                                                                          \
        for (ptrdiff_t j = 0; j < n % 8; ++j) sum += ELEMENT(j);                                                   \
        return sum;                                                                                                \
    }                                                                                                              \
    INSIDE float pairwise_##name(PARAMETERS, ptrdiff_t n) {                                                        \
        ptrdiff_t right[64]; /* lengths of second halves; 0: the first one's sum stands in left */                 \
        float left[64];                                                                                            \
        for (int depth = 0;;) {                                                                                    \
            for (; n > 128; n = first_half(n)) right[depth++] = n - first_half(n);                                 \
            float sum = short_##name(NAMES, n);                                                                    \
            MOVE(n)                                                                                                \
            while (depth && !right[depth - 1]) sum = left[--depth] + sum;                                          \
            if (!depth) return sum;                                                                                \
            left[depth - 1] = sum;                                                                                 \
            n = right[depth - 1];                                                                                  \
            right[depth - 1] = 0;                                                                                  \
        }                                                                                                          \
    }
#define TOGETHER(...) __VA_ARGS__
#define OF_X(j) x[j]
#define OF_PRODUCT(j) (a[j] * b[j])
#define MOVE_X(by) x += (by);
#define MOVE_PRODUCT(by) a += (by); b += (by);
PAIRWISE(sum, const float *restrict x, x, MOVE_X, OF_X)
PAIRWISE(dot, TOGETHER(const float *restrict a, const float *restrict b), TOGETHER(a, b), MOVE_PRODUCT, OF_PRODUCT)

LOOP_OF_8(sum_of_rows, OUT(0, y) IN(1, x), LENGTH, y[i] = 0.0f + pairwise_sum(x + i * n, n);)

LOOP_OF_8(dot_of_rows, OUT(0, y) IN(1, a) IN(2, b), LENGTH, y[i] = 0.0f + pairwise_dot(a + i * n, b + i * n, n);)

/* The same in PARTS parts of each row, which result when halves are halved 5 times: i counts the parts of all rows, and
whoever adds the parts two by two gets the row's sum. So several threads share a long row, with the same result. */
enum { HALVINGS = 5, PARTS = 1 << HALVINGS };
LOOP_OF_8(sum_of_parts, OUT(0, y) IN(1, x), LENGTH, {
    const float *part = x + i / PARTS * n;
    ptrdiff_t length = n;
    for (int bit = HALVINGS - 1; bit >= 0; --bit) {
        ptrdiff_t half = first_half(length);
        part += i >> bit & 1 ? half : 0;
        length = i >> bit & 1 ? length - half : half;
    }
    y[i] = pairwise_sum(part, length);
})
