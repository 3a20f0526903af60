# The C types of call.py, for the compiler alone.
cimport cython
from dbrdist.core.tape.node cimport Record, Value, VariableNode, make_node

cdef class Call(Record):
    @cython.locals(value=Value, node=VariableNode, rank=Py_ssize_t, num_constant=Py_ssize_t, xs=list, nodes=list,
                   has_arrays=bint, switches=dict, data=tuple)
    cpdef tuple apply(self, object inputs)

@cython.locals(keep=tuple, n=Py_ssize_t, node=VariableNode, value=Value)
cdef tuple _recorded(Call call, Py_ssize_t rank, tuple xs, tuple ys)

cpdef VariableNode constant_node(object x)
