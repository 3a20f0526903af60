/* Rows by number, as of an embedding: y (outer, count, width) are those of x (outer, height, width), or are added to them.
Included by vector_loops.h. What is added to one place is added in the order of the numbers, on as many threads as there
are. */

#include <string.h>

typedef struct {
    char *rows;   /* (outer, height, width) */
    char *picked; /* (outer, count, width) */
    const ptrdiff_t *numbers;
    ptrdiff_t outer, height, count, width;
    int itemsize, adds;
} Picking;

#define ADD_ROWS(T)                                                                                                    \
    static void add_rows_##T(const Picking *p, ptrdiff_t o, ptrdiff_t first, ptrdiff_t end, ptrdiff_t left, ptrdiff_t right) { \
        T *to = (T *)p->rows + o * p->height * p->width;                                                               \
        const T *from = (const T *)p->picked + o * p->count * p->width;                                                \
        for (ptrdiff_t k = 0; k < p->count; ++k) {                                                                     \
            ptrdiff_t number = p->numbers[k];                                                                          \
            if (number < first || number >= end) continue;                                                             \
            T *restrict sum = to + number * p->width;                                                                  \
            const T *restrict term = from + k * p->width;                                                              \
            for (ptrdiff_t j = left; j < right; ++j) sum[j] += term[j];                                                \
        }                                                                                                              \
    }
ADD_ROWS(float)
ADD_ROWS(double)

static void add_some_rows(const Picking *p, ptrdiff_t o, ptrdiff_t first, ptrdiff_t end, ptrdiff_t left, ptrdiff_t right) {
    if (p->itemsize == 4) add_rows_float(p, o, first, end, left, right);
    else add_rows_double(p, o, first, end, left, right);
}

static void copy_some_rows(const Picking *p, ptrdiff_t start, ptrdiff_t stop) { /* of all outer * count */
    ptrdiff_t bytes = p->width * p->itemsize;
    for (ptrdiff_t i = start; i < stop; ++i) {
        ptrdiff_t row = i / p->count * p->height + p->numbers[i % p->count];
        memcpy(p->picked + i * bytes, p->rows + row * bytes, (size_t)bytes);
    }
}

static ptrdiff_t share_of(ptrdiff_t size, ptrdiff_t unit, ptrdiff_t place, ptrdiff_t count) {
    ptrdiff_t share = ((size + count - 1) / count + unit - 1) / unit * unit;
    return place * share < size ? place * share : size;
}

/* Threads divide what is outside, else wide rows, else the places. */
static void pick_share(const Picking *p, ptrdiff_t place, ptrdiff_t count) {
    if (!p->adds) {
        ptrdiff_t size = p->outer * p->count;
        copy_some_rows(p, share_of(size, 1, place, count), share_of(size, 1, place + 1, count));
    } else if (p->outer >= count) {
        ptrdiff_t stop = share_of(p->outer, 1, place + 1, count);
        for (ptrdiff_t o = share_of(p->outer, 1, place, count); o < stop; ++o) add_some_rows(p, o, 0, p->height, 0, p->width);
    } else if (p->width >= 64 * count) {
        ptrdiff_t left = share_of(p->width, 64, place, count), right = share_of(p->width, 64, place + 1, count);
        for (ptrdiff_t o = 0; o < p->outer; ++o) add_some_rows(p, o, 0, p->height, left, right);
    } else {
        ptrdiff_t first = share_of(p->height, 1, place, count), end = share_of(p->height, 1, place + 1, count);
        for (ptrdiff_t o = 0; o < p->outer; ++o) add_some_rows(p, o, first, end, 0, p->width);
    }
}

static void do_picking(void *given) { pick_share((const Picking *)given, omp_thread_num(), omp_num_threads()); }

static void pick(const Picking *p) {
    ptrdiff_t size = p->outer * p->count * p->width;
    int count = gomp_parallel && size > LEAST ? omp_max_threads() : 1;
    if (count > size / LEAST) count = (int)(size / LEAST);
    if (count < 2) pick_share(p, 0, 1);
    else gomp_parallel(do_picking, (void *)p, (unsigned)count, 0);
}
