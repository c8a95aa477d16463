# C API that ends an iterator with a value without creating an exception. Cython does not declare it.

from cpython.ref cimport PyObject

cdef extern from "Python.h":
    ctypedef struct PyStopIterationObject:
        PyObject *value
    PyObject *PyExc_StopIteration
    void PyErr_Restore(PyObject *kind, PyObject *error, PyObject *trace) noexcept
