# The C types of connection.py, for the compiler alone.
cimport cython
from dbrdist.core.node cimport Record, Value, VariableNode

@cython.locals(shape=tuple, sizes=tuple, num_rows=Py_ssize_t, num_outputs=Py_ssize_t, plan=tuple)
cdef object _small_product(Record call, tuple xs)

@cython.locals(plans=dict, plan=tuple)
cdef tuple _plan(object dtype, Py_ssize_t num_rows, Py_ssize_t num_outputs)

@cython.locals(plan=tuple, grads=list, k=Py_ssize_t, i=Py_ssize_t, b=VariableNode)
cdef object _small_gradients(Record call, tuple wanted, object gy, list out)
