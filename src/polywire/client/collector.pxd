# What Python offers to those who know that an object cannot be part of a circle; Cython has no declaration of it.

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *made)
