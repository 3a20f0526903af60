# The C types of connection.py, for the compiler alone.
cimport cython
from dbrdist.core.tape.node cimport Record, Value, VariableNode

@cython.locals(plans=dict, shapes=tuple, plan=tuple)
cdef object _small_product(Record call, tuple xs)

cdef tuple _plan(dict plans, tuple shape, tuple sizes, object dtype)

@cython.locals(plan=tuple, grads=list, k=Py_ssize_t, i=Py_ssize_t, b=VariableNode)
cdef object _small_gradients(Record call, tuple wanted, object gy, list out)
