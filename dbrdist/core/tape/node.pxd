# The C types of node.py, for the compiler alone.
cimport cython

cdef class VariableNode:
    cdef object __weakref__
    cdef public object creator_node, shape, dtype, gradient, view, name
    cdef public Py_ssize_t index, rank, assigned
    cdef public bint requires_grad, is_handed_out

@cython.locals(node=VariableNode)
cpdef VariableNode make_node(object creator, Py_ssize_t index, Py_ssize_t rank, bint requires_grad, object shape, object dtype)

cdef class Value:
    cdef object __weakref__
    cdef public object _array
    cdef public VariableNode node

cpdef tuple form(object x)

cdef class Record:
    cdef public tuple inputs, wanted, _kept_xs, _kept_ys, _keep_inputs, _keep_outputs
    cdef public Py_ssize_t rank, num_outputs, recorded_at
    cdef public bint owns_gy, _on_variables
    cdef public object _for_rule
