/* The fields of PyArrayObject that NumPy shows to extensions, up to the flags; Python.h comes before. */

typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} ArrayFields;
