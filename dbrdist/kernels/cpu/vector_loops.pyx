"""Calls of the loops in ``vector_loops.h`` on arrays of NumPy."""

import numpy as np

cdef extern from "../array_fields.h":
    ctypedef struct ArrayFields:
        char *data
        int nd
        Py_ssize_t *dimensions
        int flags

cdef extern from "vector_loops.h" nogil:
    ctypedef void (*Loop)(void **arrays, Py_ssize_t start, Py_ssize_t stop, const double *numbers)
    ctypedef struct Entry:
        const char *name
        int num_arrays, written, num_numbers
        const char *rows
        Loop *of_double
    const Entry ENTRIES[]
    enum: NUM_ENTRIES
    enum: NUM_LEVELS
    int level
    void find_processor()
    int has_fma()
    Loop loop_of(const Entry *entry, bint is_double)
    enum: MOST_NUMBERS
    ctypedef struct Before:
        Loop loop
        double numbers[MOST_NUMBERS]
        ptrdiff_t *bounds
        ptrdiff_t num_spans
    Py_ssize_t length_of(const Entry *entry, const Py_ssize_t *sizes, const double *numbers)
    void run_loop(
        const Entry *entry, bint is_double, void **arrays, Py_ssize_t length, Py_ssize_t size, const double *numbers,
        const Before *before, int num_before
    )

cdef enum:
    MOST_ARRAYS = 5
    MOST_BEFORE = 8
    IN_C_ORDER = 0x1 | 0x100  # and aligned
    WRITEABLE = 0x400

cdef object ndarray = np.ndarray
find_processor()
OF_FLOAT_ALONE = {ENTRIES[i].name.decode() for i in range(NUM_ENTRIES) if ENTRIES[i].of_double[0] is NULL}
PLACES = {
    ENTRIES[i].name.decode(): i for i in range(NUM_ENTRIES) if has_fma() or ENTRIES[i].of_double[0] is not NULL
}

ARITIES = {ENTRIES[i].name.decode(): (ENTRIES[i].num_arrays, ENTRIES[i].num_numbers) for i in range(NUM_ENTRIES)}


ROWS = {ENTRIES[i].name.decode(): ENTRIES[i].rows.decode() for i in range(NUM_ENTRIES) if ENTRIES[i].rows is not NULL}


def use_level(int number):
    """Run what was compiled for a set of instructions, from 0 (any processor) on; return the number until now. For tests:
    the processor must have them."""
    global level
    cdef int before = level
    if not 0 <= number < NUM_LEVELS:
        raise ValueError(f"expected a level from 0 to {NUM_LEVELS - 1}, got {number}")
    level = number
    return before


def run(int place, bint is_double, tuple arrays, tuple numbers, tuple before=()):
    """Run a loop, by its place, over dense arrays of the sizes that it needs, all float64 or all float32; False if they
    are not such.

    ``before`` are loops over the first two arrays that run within the same pass, each before the next: their places,
    numbers, and the first and last + 1 element of the stretches that they are for, or None for all. The caller has
    looked at the types of the arrays. Arrays that share memory are refused: the loops read ahead.
    """
    cdef void *starts[MOST_ARRAYS]
    cdef double values[MOST_NUMBERS]
    cdef Before befores[MOST_BEFORE]
    cdef const Entry *entry = &ENTRIES[place]
    cdef Py_ssize_t sizes[MOST_ARRAYS]
    cdef Py_ssize_t length, size = 0
    cdef int i, written = entry.written, count = len(before)
    if len(arrays) != entry.num_arrays:
        raise TypeError(f"{entry.name.decode()}: expected {entry.num_arrays} arrays, got {len(arrays)}")
    if count > MOST_BEFORE:
        return False
    for i in range(count):
        written |= ENTRIES[<int> before[i][0]].written
    if not _are_separate(arrays, written, 8 if is_double else 4, starts, sizes):
        return False
    _take(entry, numbers, values)
    length = length_of(entry, sizes, values)
    if length < 0:
        return False
    for i in range(entry.num_arrays):
        size = max(size, sizes[i])
    kept = []  # the memory of the stretches
    for i in range(count):
        _take_before(&befores[i], before[i], is_double, kept)
    with nogil:
        run_loop(entry, is_double, starts, length, size, values, befores, count)
    return True


cdef bint _are_separate(tuple arrays, int written, int itemsize, void **starts, Py_ssize_t *sizes):
    """Whether the arrays are dense, do not overlap, and may be written where a loop does so."""
    cdef ArrayFields *a
    cdef Py_ssize_t n
    cdef int i, k, wanted, count = len(arrays)
    for i in range(count):
        if type(arrays[i]) is not ndarray:
            return False
        a = <ArrayFields *> <void *> arrays[i]
        wanted = IN_C_ORDER | WRITEABLE * (written >> i & 1)
        if a.flags & wanted != wanted:
            return False
        n = 1
        for k in range(a.nd):
            n *= a.dimensions[k]
        sizes[i], starts[i] = n, a.data
    for i in range(count):
        for k in range(i):
            if (
                <char *> starts[i] < <char *> starts[k] + sizes[k] * itemsize
                and <char *> starts[k] < <char *> starts[i] + sizes[i] * itemsize
            ):
                return False
    return True


cdef int _take(const Entry *entry, tuple numbers, double *values) except -1:
    cdef int i
    if len(numbers) != entry.num_numbers:
        raise TypeError(f"{entry.name.decode()}: expected {entry.num_numbers} numbers, got {len(numbers)}")
    for i in range(entry.num_numbers):
        values[i] = numbers[i]
    return 0


cdef int _take_before(Before *loop, tuple given, bint is_double, list kept) except -1:
    """One loop that runs before the others."""
    cdef const Entry *entry = &ENTRIES[<int> given[0]]
    cdef Py_ssize_t k
    loop.loop = loop_of(entry, is_double)
    _take(entry, given[1], loop.numbers)
    loop.bounds, loop.num_spans = NULL, 0
    if given[2] is not None:
        spans = given[2]
        loop.num_spans = len(spans)
        memory = bytearray(2 * len(spans) * sizeof(ptrdiff_t) + 1)
        kept.append(memory)
        loop.bounds = <ptrdiff_t *> <char *> memory
        for k in range(loop.num_spans):
            loop.bounds[2 * k], loop.bounds[2 * k + 1] = spans[k][0], spans[k][1]
    return 0
