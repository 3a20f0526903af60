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
        Loop of_float, of_double
    const Entry ENTRIES[]
    enum: NUM_ENTRIES
    void find_threads()
    void run_loop(Loop loop, void **arrays, Py_ssize_t size, const double *numbers)

cdef enum:
    MOST_ARRAYS = 5
    MOST_NUMBERS = 8
    IN_C_ORDER = 0x1 | 0x100  # and aligned
    WRITEABLE = 0x400

cdef object ndarray = np.ndarray
PLACES = {ENTRIES[i].name.decode(): i for i in range(NUM_ENTRIES)}
OF_FLOAT_ALONE = {ENTRIES[i].name.decode() for i in range(NUM_ENTRIES) if ENTRIES[i].of_double is NULL}
find_threads()


def run(int place, bint is_double, tuple arrays, tuple numbers):
    """Run a loop, by its place, over dense arrays of one size, all float64 or all float32; False if they are not such.

    The caller has looked at their types. Arrays that share memory are refused: the loops read ahead.
    """
    cdef void *starts[MOST_ARRAYS]
    cdef double values[MOST_NUMBERS]
    cdef const Entry *entry = &ENTRIES[place]
    cdef ArrayFields *a
    cdef Py_ssize_t size = -1, n, num_bytes
    cdef int i, k, wanted
    if len(arrays) != entry.num_arrays or len(numbers) != entry.num_numbers:
        raise TypeError(f"{entry.name.decode()}: expected {entry.num_arrays} arrays and {entry.num_numbers} numbers")
    for i in range(entry.num_arrays):
        if type(arrays[i]) is not ndarray:
            return False
        a = <ArrayFields *> <void *> arrays[i]
        wanted = IN_C_ORDER | WRITEABLE * (entry.written >> i & 1)
        if a.flags & wanted != wanted:
            return False
        n = 1
        for k in range(a.nd):
            n *= a.dimensions[k]
        if size >= 0 and n != size:
            return False
        size, starts[i] = n, a.data
    num_bytes = size * (8 if is_double else 4)
    for i in range(entry.num_arrays):
        for k in range(i):
            if <char *> starts[i] < <char *> starts[k] + num_bytes and <char *> starts[k] < <char *> starts[i] + num_bytes:
                return False
    for i in range(entry.num_numbers):
        values[i] = numbers[i]
    cdef Loop loop = entry.of_double if is_double else entry.of_float
    with nogil:
        run_loop(loop, starts, size, values)
    return True
