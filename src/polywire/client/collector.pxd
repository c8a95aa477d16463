# Python API for making objects that cannot be part of a reference cycle. Cython does not declare the last, and the first
# with an argument of a type that compilers reject.

cdef extern from "Python.h":
    object PyType_GenericAlloc(type kind, Py_ssize_t fields)
    void PyObject_GC_UnTrack(void *made)
