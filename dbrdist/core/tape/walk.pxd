# The C types of walk.py, for the compiler alone.
cimport cython
from dbrdist.core.tape.node cimport Record, VariableNode

@cython.locals(heap=list, is_of_host=bint, nodes=tuple, wanted=tuple, gxs=tuple, following=VariableNode, node=VariableNode,
               creator=Record, k=Py_ssize_t, i=Py_ssize_t)
cdef object _run_chain(object walk, Record function, tuple gys)

@cython.locals(out=list, k=Py_ssize_t, i=Py_ssize_t, node=VariableNode)
cpdef list views(tuple nodes, tuple wanted)

cdef list _views_there(tuple nodes, tuple wanted)
