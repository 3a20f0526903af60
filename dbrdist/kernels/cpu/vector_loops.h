/* Loops over large arrays, one pass over memory each, divided among the threads of OpenMP that oneDNN uses too.

Every operation is rounded as NumPy rounds it, in NumPy's order, without fused multiply-add, so that a result does not
depend on whether dbrdist is compiled, nor on the number of threads. Functions of float that need an exponential are an
exception: NumPy's differ by a few units in the last place, also from one processor to another. These loops' do not: they
say where they want a fused multiply-add, and are left out where the processor has none. A loop takes its arrays, the first
and the last + 1 element, and its numbers. */

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>

/* Without it, what is large is called, and a loop that calls something becomes no vectors. */
#if defined(__GNUC__)
#define INSIDE static inline __attribute__((always_inline))
#else
#define INSIDE static inline
#endif

#include "elementary.h"
#include "special.h"

typedef void (*Loop)(void **arrays, ptrdiff_t start, ptrdiff_t stop, const double *numbers);

/* Each loop is compiled for two sets of instructions, from which find_level chooses when the module is loaded: a
compiler's own choice (target_clones) leaves loops with fmaf without vectors. For x86-64 without AVX2, older than 2013, there
is no loop, -1, and NumPy computes: a third set would be a sixth of the compilation. */
#if defined(__x86_64__) && defined(__GNUC__)
enum { NUM_LEVELS = 2 };
#define FOR_EACH_LEVEL(f, ...)                                          \
    __attribute__((target("avx512f"))) static BODY(f##_avx512, __VA_ARGS__) \
    __attribute__((target("avx2,fma"))) static BODY(f##_avx2, __VA_ARGS__)
#define ALL_LEVELS(f) {f##_avx2, f##_avx512}
/* Sums of 8 lanes, short rows, and what goes from one element to the next: where vectors have 16, as much time passes
or a third more, and two loops take twice the compilation of one. */
#define FOR_LEVEL_OF_8(f, ...) __attribute__((target("avx2,fma"))) static BODY(f##_avx2, __VA_ARGS__)
#define LEVEL_OF_8(f) {f##_avx2, f##_avx2}
/* What loops call once for many rows, instead of a copy within each of them. */
#define OUTSIDE __attribute__((target("avx2,fma"), noinline)) static
static int find_level(void) {
    if (__builtin_cpu_supports("avx512f")) return 1;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 0 : -1;
}
#define HAS_FMA 1
#else
enum { NUM_LEVELS = 1 };
#define FOR_EACH_LEVEL(f, ...) static BODY(f##_plain, __VA_ARGS__)
#define ALL_LEVELS(f) {f##_plain}
#define FOR_LEVEL_OF_8 FOR_EACH_LEVEL
#define LEVEL_OF_8 ALL_LEVELS
#define OUTSIDE static
static int find_level(void) { return 0; }
/* Without the instruction, the functions of elementary.h and special.h take a thousand times as long. */
#if defined(__FP_FAST_FMAF) || defined(FP_FAST_FMAF)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif
#endif
static int level;

/* A loop of float and one of double, for which one set of instructions is enough. ARRAYS and NUMBERS declare what they are
called in what follows, for each i. */
#define BODY(f, T, ARRAYS, NUMBERS, ...)                                                   \
    void f(void **arrays, ptrdiff_t start, ptrdiff_t stop, const double *numbers) {        \
        typedef T Real;                                                                    \
        (void)numbers;                                                                     \
        ARRAYS NUMBERS                                                                     \
        for (ptrdiff_t i = start; i < stop; ++i) { __VA_ARGS__ }                           \
    }
#define FLOAT_LOOP(name, ARRAYS, NUMBERS, ...) FOR_EACH_LEVEL(name##_float, float, ARRAYS, NUMBERS, __VA_ARGS__)
#define LOOP(name, ARRAYS, NUMBERS, ...)              \
    FLOAT_LOOP(name, ARRAYS, NUMBERS, __VA_ARGS__)    \
    FOR_LEVEL_OF_8(name##_double, double, ARRAYS, NUMBERS, __VA_ARGS__)
#define LOOP_OF_8(name, ARRAYS, NUMBERS, ...) FOR_LEVEL_OF_8(name##_float, float, ARRAYS, NUMBERS, __VA_ARGS__)
#define OUT(place, a) Real *restrict a = (Real *)arrays[place];
#define IN(place, a) const Real *restrict a = (const Real *)arrays[place];
/* In the place of the last number, where a loop writes to several arrays: the compiler looks for overlaps of few. */
#define NOTHING_OVERLAPS _Pragma("GCC ivdep")
#define NUMBER(place, a) const Real a = (Real)numbers[place];

#define ROOT(x) (sizeof(Real) == sizeof(float) ? (Real)sqrtf((float)(x)) : (Real)sqrt((double)(x)))
/* As np.maximum and np.minimum: NaN stays, whichever operand it is. */
#define LARGER(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) <= (b) || (a) != (a) ? (a) : (b))
/* The same for a bound that is no NaN: one comparison. */
#define AT_LEAST(bound, a) ((a) < (bound) ? (bound) : (a))
#define AT_MOST(bound, a) ((a) > (bound) ? (bound) : (a))

/* ---- update rules; p is written, g is read */

LOOP(sgd, OUT(0, p) IN(1, g), NUMBER(0, lr), p[i] = p[i] - g[i] * lr;)

LOOP(momentum_sgd, OUT(0, p) IN(1, g) OUT(2, v), NUMBER(0, lr) NUMBER(1, momentum), {
    Real moved = v[i] * momentum - g[i] * lr;
    v[i] = moved;
    p[i] = p[i] + moved;
})

LOOP(corrected_momentum_sgd, OUT(0, p) IN(1, g) OUT(2, v), NUMBER(0, lr) NUMBER(1, momentum), {
    Real moved = v[i] * momentum - g[i];
    v[i] = moved;
    p[i] = p[i] + moved * lr;
})

LOOP(nesterov_ag, OUT(0, p) IN(1, g) OUT(2, v), NUMBER(0, lr) NUMBER(1, momentum), {
    Real step = g[i] * lr;
    Real moved = v[i] * momentum - step;
    v[i] = moved;
    p[i] = (p[i] - step) + moved * momentum;
})

/* rest1 and rest2: 1 - beta1 and 1 - beta2; alpha: with the correction of both biases; kept: the factor of p. */
#define ADAM_NUMBERS                                                                          \
    NUMBER(0, beta1) NUMBER(1, rest1) NUMBER(2, beta2) NUMBER(3, rest2) NUMBER(4, alpha)      \
    NUMBER(5, eps) NUMBER(6, kept) const int has_eps = numbers[5] != 0;
#define ADAM_MEANS                                          \
    Real gradient = g[i];                                   \
    Real first = m[i] * beta1 + gradient * rest1;           \
    Real second = v[i] * beta2 + (gradient * gradient) * rest2; \
    m[i] = first;                                           \
    v[i] = second;
#define ADAM_STEP                               \
    Real below = ROOT(second) + eps;            \
    below = has_eps || below != 0 ? below : 1;  \
    p[i] = p[i] * kept - (first / below) * alpha;

LOOP(adam, OUT(0, p) IN(1, g) OUT(2, m) OUT(3, v), ADAM_NUMBERS, { ADAM_MEANS ADAM_STEP })

LOOP(amsgrad, OUT(0, p) IN(1, g) OUT(2, m) OUT(3, v) OUT(4, largest), ADAM_NUMBERS, {
    ADAM_MEANS
    second = LARGER(largest[i], second);
    largest[i] = second;
    ADAM_STEP
})

LOOP(ada_grad, OUT(0, p) IN(1, g) OUT(2, h), NUMBER(0, lr) NUMBER(1, eps) const int has_eps = numbers[1] != 0;, {
    Real gradient = g[i];
    Real squares = h[i] + gradient * gradient;
    h[i] = squares;
    Real below = ROOT(squares) + eps;
    below = has_eps || below != 0 ? below : 1;
    p[i] = p[i] - (gradient / below) * lr;
})

LOOP(rmsprop, OUT(0, p) IN(1, g) OUT(2, ms),
     NUMBER(0, lr) NUMBER(1, alpha) NUMBER(2, rest) NUMBER(3, eps) const int has_eps = numbers[3] != 0;, {
    Real gradient = g[i];
    Real mean = ms[i] * alpha + (gradient * gradient) * rest;
    ms[i] = mean;
    Real below = ROOT(mean) + eps;
    below = has_eps || below != 0 ? below : 1;
    p[i] = p[i] - (gradient / below) * lr;
})

/* ---- hooks of optimizers, over the first two arrays of a rule */

LOOP(weight_decay, IN(0, p) OUT(1, g), NUMBER(0, rate), g[i] = g[i] + p[i] * rate;)

LOOP(decoupled_weight_decay, OUT(0, p), NUMBER(0, factor), p[i] = p[i] * factor;)

LOOP(lasso, IN(0, p) OUT(1, g), NUMBER(0, rate), {
    Real sign = p[i] > 0 ? (Real)1 : p[i] < 0 ? (Real)-1 : p[i] == 0 ? (Real)0 : p[i];
    g[i] = g[i] + sign * rate;
})

LOOP(hard_clipping, OUT(1, g), NUMBER(0, lower) NUMBER(1, upper), {
    Real raised = g[i] < lower ? lower : g[i];
    g[i] = raised > upper ? upper : raised;
})

#include "elementwise_loops.h"
#include "row_loops.h"
#include "product_loops.h"
#include "score_loops.h"
#include "plane_loops.h"
#include "sampling_loops.h"
#include "pooling_loops.h"
#include "conversion_loops.h"

/* written: a bit for each array that is. rows: where the loop is over rows of n = numbers[0] elements, what each array has
for a row: x n, t 2n, r one, p one for each of its parts, which the loop counts; w n for all of them together, j n numbers of elements.
Where it is over columns of n elements, of which there are m = numbers[1]: c n m, m one for each, s numbers[2] for each. Where it is over channels
of n elements, i n m, v one for each. Where it is over groups of channels of numbers[2] elements, k one for each of a group,
g one for each of an image, m of them. Where it is over images whose channels lie together, n and b m for each, of pixels of
numbers[2] channels, and q four for each pixel of n; where it is over windows, x n of these and b m elements. NULL where all arrays are of one size. */
typedef struct {
    const char *name;
    int num_arrays, written, num_numbers;
    const char *rows;
    Loop of_float[NUM_LEVELS], of_double[NUM_LEVELS];
} Entry;

#define ENTRY(name, num_arrays, written, num_numbers) \
    {#name, num_arrays, written, num_numbers, NULL, ALL_LEVELS(name##_float), LEVEL_OF_8(name##_double)}
#define FLOAT_ENTRY(name, num_arrays, written, num_numbers) \
    {#name, num_arrays, written, num_numbers, NULL, ALL_LEVELS(name##_float), {NULL}}
#define ROW_ENTRY(name, rows, written, num_numbers) \
    {#name, sizeof(rows) - 1, written, num_numbers, rows, ALL_LEVELS(name##_float), {NULL}}
#define ENTRY_OF_8(name, rows, written, num_numbers) \
    {#name, sizeof(rows) - 1, written, num_numbers, rows, LEVEL_OF_8(name##_float), {NULL}}
static const Entry ENTRIES[] = {
    ENTRY(sgd, 2, 1, 1),         ENTRY(momentum_sgd, 3, 5, 2), ENTRY(corrected_momentum_sgd, 3, 5, 2),
    ENTRY(nesterov_ag, 3, 5, 2), ENTRY(adam, 4, 13, 7),        ENTRY(amsgrad, 5, 29, 7),
    ENTRY(ada_grad, 3, 5, 2),    ENTRY(rmsprop, 3, 5, 4),
    ENTRY(weight_decay, 2, 2, 1), ENTRY(decoupled_weight_decay, 2, 1, 1),
    ENTRY(lasso, 2, 2, 1),        ENTRY(hard_clipping, 2, 2, 2),
    ENTRY(hard_sigmoid, 2, 1, 0), ENTRY(hard_sigmoid_gradient, 3, 1, 0),
    ENTRY(huber, 3, 1, 1),        ENTRY(huber_gradient, 4, 1, 1),
    ENTRY(relu_backward, 3, 1, 0), ENTRY(relu_backward_over, 2, 1, 0),
    ENTRY(relu_backward_of_sum, 4, 1, 0), ENTRY(relu_backward_of_sum_over, 3, 1, 0),
    ENTRY(distance, 3, 1, 0),     ENTRY(distance_gradient, 4, 1, 0),
    ENTRY(leaky_relu, 2, 1, 1),   ENTRY(leaky_relu_gradient, 3, 1, 1),
    ENTRY(hardswish, 2, 1, 0),    ENTRY(hardswish_gradient, 3, 1, 0),
    ENTRY(clipped_gradient, 3, 1, 1), ENTRY(absolute_gradient, 3, 1, 0),
    FLOAT_ENTRY(sigmoid, 2, 1, 0),   FLOAT_ENTRY(sigmoid_gradient, 3, 1, 0),
    FLOAT_ENTRY(silu, 2, 1, 1),      FLOAT_ENTRY(silu_gradient, 3, 1, 1),
    FLOAT_ENTRY(softplus, 2, 1, 1),  FLOAT_ENTRY(softplus_gradient, 3, 1, 1),
    FLOAT_ENTRY(bernoulli, 3, 1, 0), FLOAT_ENTRY(bernoulli_gradient, 4, 1, 0),
    FLOAT_ENTRY(elu, 2, 1, 2),       FLOAT_ENTRY(elu_gradient, 3, 1, 2),
    FLOAT_ENTRY(gelu, 2, 1, 0),      FLOAT_ENTRY(gelu_gradient, 3, 1, 0),
    FLOAT_ENTRY(ndtr, 2, 1, 0),      FLOAT_ENTRY(erf, 2, 1, 0),
    FLOAT_ENTRY(erfc, 2, 1, 0),      FLOAT_ENTRY(bell_gradient, 3, 1, 2),
    FLOAT_ENTRY(erfinv, 2, 1, 0),    FLOAT_ENTRY(normal_quantile, 2, 1, 2),
    FLOAT_ENTRY(erfcx, 2, 1, 0),     FLOAT_ENTRY(rising_bell_gradient, 3, 1, 2),
    FLOAT_ENTRY(log_ndtr, 2, 1, 0),  FLOAT_ENTRY(log_ndtr_gradient, 3, 1, 0),
    FLOAT_ENTRY(digamma, 2, 1, 0),   FLOAT_ENTRY(digamma_product, 3, 1, 0),
    FLOAT_ENTRY(lgamma_of_positive, 2, 1, 0), FLOAT_ENTRY(trigamma_product, 3, 1, 0),
    FLOAT_ENTRY(box_muller, 3, 1, 0), ENTRY(reciprocal_gradient, 3, 1, 0),
    FLOAT_ENTRY(square_gradient, 3, 1, 0),
    ENTRY(sum_of_2, 3, 1, 0),      ENTRY(sum_of_3, 4, 1, 0),      ENTRY(sum_of_4, 5, 1, 0),
    ENTRY(sum_of_2_over, 2, 1, 0), ENTRY(sum_of_3_over, 3, 1, 0), ENTRY(sum_of_4_over, 4, 1, 0),
    ENTRY(relu_forward, 2, 1, 0),    ENTRY(root, 2, 1, 0),     ENTRY(root_gradient, 3, 1, 0),
    ENTRY(square, 2, 1, 0),          ENTRY(relu_of_sum_over, 2, 1, 0),
    ROW_ENTRY(log_softmax, "xx", 1, 1),   ROW_ENTRY(log_softmax_backward, "xxx", 1, 1),
    ROW_ENTRY(softmax, "xx", 1, 1),       ROW_ENTRY(softmax_backward, "xxx", 1, 1),
    ROW_ENTRY(add_row, "xxw", 1, 1),      ROW_ENTRY(add_column, "xxr", 1, 1),
    ROW_ENTRY(mul_row, "xxw", 1, 1),      ROW_ENTRY(mul_column, "xxr", 1, 1),
    ROW_ENTRY(swish_rows, "xxw", 1, 1),   ROW_ENTRY(swish_rows_backward, "xxxxw", 3, 1),
    ENTRY_OF_8(fixed_normalization_backward, "cssccmm", 7, 4), ROW_ENTRY(fill_rows, "xr", 1, 1),
    ROW_ENTRY(relu_of_sum_marked, "xrx", 3, 1), ROW_ENTRY(relu_backward_marked, "xrx", 1, 1),
    ROW_ENTRY(relu_backward_marked_over, "xr", 1, 1), ROW_ENTRY(relu_backward_of_sum_marked, "xrxx", 1, 1),
    ROW_ENTRY(relu_backward_of_sum_marked_over, "xrx", 1, 1),
    ROW_ENTRY(rectified_sum, "xxgx", 1, 2), ROW_ENTRY(rectified_sum_of_two, "xxgxg", 1, 2),
    ENTRY_OF_8(crelu, "tx", 1, 1),         ENTRY_OF_8(crelu_backward, "xtt", 1, 1),
    ENTRY_OF_8(max_of_rows, "rx", 1, 1),   ENTRY_OF_8(min_of_rows, "rx", 1, 1),
    ENTRY_OF_8(extremum_backward, "xxrr", 1, 1),
    ENTRY_OF_8(cumsum_of_rows, "xx", 1, 2),    ENTRY_OF_8(cumsum_of_columns, "cc", 1, 4),
    ENTRY_OF_8(cumprod_of_rows, "xx", 1, 2),   ENTRY_OF_8(cumprod_of_columns, "cc", 1, 4),
    ENTRY_OF_8(cumprod_of_rows_backward, "xxxx", 1, 1), ENTRY_OF_8(cumprod_of_columns_backward, "cccc", 1, 2),
    ROW_ENTRY(prod_of_rows, "rx", 1, 1),      ENTRY_OF_8(prod_of_columns, "mc", 1, 2),
    ENTRY_OF_8(prod_of_rows_backward, "xxr", 1, 1), ENTRY_OF_8(prod_of_columns_backward, "ccm", 1, 2),
    ENTRY_OF_8(sum_of_rows, "rx", 1, 1),  ENTRY_OF_8(sum_of_parts, "px", 1, 1),
    ENTRY_OF_8(dot_of_rows, "rxx", 1, 1), ENTRY_OF_8(sum_of_columns, "mc", 1, 3),
    ROW_ENTRY(normalize_planes, "ivvivv", 7, 4),   ROW_ENTRY(normalize_planes_backward, "ivviivvv", 7, 4),
    ROW_ENTRY(apply_to_planes, "iivvvv", 1, 4),
    ROW_ENTRY(normalize_groups, "xrrxgg", 7, 4),   ROW_ENTRY(normalize_groups_backward, "xkkxxrrg", 7, 4),
    ROW_ENTRY(cross_entropy, "rrrrxr", 15, 1),     ROW_ENTRY(cross_entropy_gradient, "xxrrrrr", 1, 1),
    ROW_ENTRY(soft_cross_entropy, "rrrrxx", 15, 1), ROW_ENTRY(soft_cross_entropy_gradient, "xxxrrr", 1, 1),
    ENTRY_OF_8(mix_pixels, "xbqq", 1, 3), ENTRY_OF_8(spread_pixels, "bbxqq", 3, 3), ENTRY_OF_8(pixel_products, "qxbq", 1, 3),
    ENTRY_OF_8(interpolate_rows, "xbjjw", 1, 2), ENTRY_OF_8(largest_along, "xxb", 3, 6), ENTRY_OF_8(spread_along, "bxx", 1, 6),
    ENTRY(interpolated, 4, 1, 0), ENTRY(interpolated_gradients, 7, 7, 0),
    ENTRY(weighted_mean_gradients, 6, 3, 0),
    FLOAT_ENTRY(gaussian_nll, 4, 1, 0), FLOAT_ENTRY(gaussian_nll_gradients, 7, 7, 0),
    FLOAT_ENTRY(laplace_nll, 4, 1, 0),  FLOAT_ENTRY(laplace_nll_gradients, 7, 7, 0),
    FLOAT_ENTRY(focal_loss, 3, 1, 3),   FLOAT_ENTRY(focal_loss_gradient, 4, 1, 3),
    FLOAT_ENTRY(fmod, 3, 1, 0),      FLOAT_ENTRY(remainder, 3, 1, 0),
};
enum { NUM_ENTRIES = sizeof(ENTRIES) / sizeof(ENTRIES[0]), LEAST = 1 << 15 };

/* ---- threads: those of libgomp, by their functions' addresses, so that there is one pool beside oneDNN's, not two */

/* ---- loops that run within the pass of another, over stretches: bounds are first and last + 1 elements, in order */

/* Elements that stay in a core's first cache for all arrays of a rule. Weight decay and momentum, or Adam, over 10 million
floats take 0.57 and 0.62 of two passes in pieces of 1,024, and 1.0 of them in pieces of 4,096. */
enum { MOST_NUMBERS = 8, PIECE = 1 << 10, MOST_ARRAYS = 8, MOST_BROADCAST = 2 };

typedef struct { Loop loop; double numbers[MOST_NUMBERS]; ptrdiff_t *bounds, num_spans; } Before;
/* An operand that is broadcast: element i has the value at (i / each % count) * step bytes. each 0: it is dense. */
typedef struct { ptrdiff_t each, count, step; } Broadcast;
typedef struct {
    Loop loop;
    void **arrays;
    ptrdiff_t size, unit; /* a share is some units */
    const double *numbers;
    const Before *before;
    int num_before;
    const Broadcast *broadcasts; /* of each array; NULL: all are dense */
    int num_arrays, itemsize;
} Work;

static void do_before(const Before *before, void **arrays, ptrdiff_t start, ptrdiff_t stop) {
    if (!before->bounds) {
        before->loop(arrays, start, stop, before->numbers);
        return;
    }
    ptrdiff_t first = 0, end = before->num_spans; /* the first that reaches beyond start */
    while (first < end) {
        ptrdiff_t middle = first + (end - first) / 2;
        if (before->bounds[2 * middle + 1] > start) end = middle;
        else first = middle + 1;
    }
    for (; first < before->num_spans && before->bounds[2 * first] < stop; ++first) {
        ptrdiff_t from = before->bounds[2 * first], to = before->bounds[2 * first + 1];
        before->loop(arrays, from < start ? start : from, to > stop ? stop : to, before->numbers);
    }
}

/* Lay out the values from start to stop of what is broadcast. */
#define SPREAD(T)                                                                       \
    static void spread_##T(T *to, const char *from, Broadcast b, ptrdiff_t start, ptrdiff_t stop) { \
        ptrdiff_t place = start / b.each % b.count, left = b.each - start % b.each;      \
        for (ptrdiff_t i = start; i < stop;) {                                          \
            ptrdiff_t count = left < stop - i ? left : stop - i;                        \
            T value = *(const T *)(from + place * b.step);                              \
            for (ptrdiff_t k = 0; k < count; ++k) to[k] = value;                        \
            to += count;                                                                \
            i += count;                                                                 \
            left = b.each;                                                              \
            place = place + 1 == b.count ? 0 : place + 1;                               \
        }                                                                               \
    }
SPREAD(float)
SPREAD(double)

static void do_broadcast(const Work *work, ptrdiff_t start, ptrdiff_t stop) {
    double spread[MOST_BROADCAST][PIECE];
    void *arrays[MOST_ARRAYS];
    int is_spread = 0;
    for (ptrdiff_t next; start < stop; start = next) {
        next = stop - start > PIECE ? start + PIECE : stop;
        for (int i = 0, k = 0; i < work->num_arrays; ++i) {
            const Broadcast *b = work->broadcasts + i;
            char *data = (char *)work->arrays[i];
            arrays[i] = b->each ? (void *)spread[k] : data + start * work->itemsize;
            if (!b->each) continue;
            if (b->count == 1 && is_spread) ++k; /* one value, which the piece before has */
            else if (work->itemsize == 4) spread_float((float *)spread[k++], data, *b, start, next);
            else spread_double(spread[k++], data, *b, start, next);
        }
        work->loop(arrays, 0, next - start, work->numbers);
        is_spread = 1;
    }
}

static void do_stretch(const Work *work, ptrdiff_t start, ptrdiff_t stop) {
    if (work->broadcasts) {
        do_broadcast(work, start, stop);
        return;
    }
    if (!work->num_before) {
        work->loop(work->arrays, start, stop, work->numbers);
        return;
    }
    for (ptrdiff_t next; start < stop; start = next) {
        next = stop - start > PIECE ? start + PIECE : stop;
        for (int k = 0; k < work->num_before; ++k) do_before(work->before + k, work->arrays, start, next);
        work->loop(work->arrays, start, next, work->numbers);
    }
}

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread_num)(void), (*omp_num_threads)(void), (*omp_max_threads)(void);

static void leave_threads(void) { gomp_parallel = NULL; } /* a forked child has none of its parent's */

static void find_processor(void) {
    level = find_level();
    find_half();
    void *library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return;
    *(void **)&omp_thread_num = dlsym(library, "omp_get_thread_num");
    *(void **)&omp_num_threads = dlsym(library, "omp_get_num_threads");
    *(void **)&omp_max_threads = dlsym(library, "omp_get_max_threads");
    *(void **)&gomp_parallel = dlsym(library, "GOMP_parallel");
    if (!omp_thread_num || !omp_num_threads || !omp_max_threads) gomp_parallel = NULL;
    pthread_atfork(NULL, NULL, leave_threads);
}

static void do_share(void *given) {
    const Work *work = (const Work *)given;
    ptrdiff_t count = omp_num_threads(), place = omp_thread_num();
    ptrdiff_t share = (work->size + count - 1) / count;
    share = (share + work->unit - 1) / work->unit * work->unit;
    ptrdiff_t start = place * share, stop = start + share;
    if (stop > work->size) stop = work->size;
    if (start < stop) do_stretch(work, start, stop);
}

/* What is of float alone may use a fused multiply-add. */
static int is_served(const Entry *entry) { return level >= 0 && (HAS_FMA || entry->of_double[0]); }

static Loop loop_of(const Entry *entry, int is_double) {
    return (is_double ? entry->of_double : entry->of_float)[level];
}

static ptrdiff_t of_row(char kind, const double *numbers) {
    ptrdiff_t n = (ptrdiff_t)numbers[0];
    switch (kind) {
        case 'r': return 1;
        case 'p': return PARTS;
        case 't': return 2 * n;
        case 'b': return (ptrdiff_t)numbers[1];
        case 'q': return numbers[2] >= 1 ? 4 * (n / (ptrdiff_t)numbers[2]) : 0;
        case 'k': return numbers[2] >= 1 ? n / (ptrdiff_t)numbers[2] : 0;
        case 'g':
        case 'm':
        case 'v': return (ptrdiff_t)numbers[1];
        case 's': return (ptrdiff_t)numbers[1] * (ptrdiff_t)numbers[2];
        case 'c':
        case 'i': return n * (ptrdiff_t)numbers[1];
        default: return n;
    }
}

/* How many elements, rows, parts or columns a loop counts if all arrays have the sizes that it needs, else -1. */
static ptrdiff_t length_of(const Entry *entry, const ptrdiff_t *sizes, const double *numbers) {
    ptrdiff_t count = entry->rows ? -1 : sizes[0];
    for (int i = 0; i < entry->num_arrays; ++i) {
        char kind = entry->rows ? entry->rows[i] : ' ';
        ptrdiff_t each = entry->rows ? of_row(kind, numbers) : 1;
        if (each < 1 || sizes[i] % each) return -1;
        int is_once = strchr("wjcmsivg", kind) != NULL;
        if (is_once ? sizes[i] != each : count >= 0 && sizes[i] / each != count) return -1;
        if (!is_once) count = sizes[i] / each;
    }
    if (!entry->rows) return count;
    char last = entry->rows[entry->num_arrays - 1];
    return strchr("cmv", last) ? (ptrdiff_t)numbers[1] : entry->rows[0] == 'p' ? count * PARTS : count;
}

/* Divide a loop's elements or rows among threads; size: the number of elements of the largest array */
static void run_work(Work *work, ptrdiff_t size) {
    int count = gomp_parallel && size > LEAST ? omp_max_threads() : 1;
    if (count > size / LEAST) count = (int)(size / LEAST);
    if (count > work->size) count = (int)work->size;
    if (count < 2) do_stretch(work, 0, work->size);
    else gomp_parallel(do_share, work, (unsigned)count, 0);
}

/* length: the number of elements, or of rows; size: the number of elements of the largest array */
static void run_loop(const Entry *entry, int is_double, void **arrays, const Broadcast *broadcasts, ptrdiff_t length,
                     ptrdiff_t size, const double *numbers, const Before *before, int num_before) {
    /* elements and columns: no two threads write to one cache line */
    Work work = {loop_of(entry, is_double), arrays, length, length == size ? 64 : 1, numbers, before, num_before,
                 broadcasts, entry->num_arrays, is_double ? 8 : 4};
    if (entry->rows && strchr("cm", entry->rows[entry->num_arrays - 1])) work.unit = COLUMN_TURNS;
    run_work(&work, size);
}

/* A conversion of size elements, to from another type. */
static void convert(int kind, void *to, void *from, ptrdiff_t size) {
    void *arrays[2] = {to, from};
    Work work = {CONVERSIONS[kind][level], arrays, size, 64, NULL, NULL, 0, NULL, 2, 0};
    run_work(&work, size);
}

#include "numbered_rows.h"
#include "filtered_rows.h"
#include "looked_up.h"
#include "random_words.h"

/* What follows are Cython's calls of these loops, which need none of the loops' optimizations: a fifteenth of the time of
compilation. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
