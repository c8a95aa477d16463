# Python API for objects that cannot be part of a reference cycle. Cython does not declare it.

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *made)
