# How an iterator of C hands over its last value without making an exception for each; Cython has no declaration of it.

from cpython.ref cimport PyObject

cdef extern from "Python.h":
    ctypedef struct PyStopIterationObject:
        PyObject *value
    PyObject *PyExc_StopIteration
    void PyErr_Restore(PyObject *kind, PyObject *error, PyObject *trace) noexcept
