# C declarations of framed.py for the other compiled modules.

from polywire.protocols.runtime.sequential cimport BareSequential


cdef class BareFramed(BareSequential):
    pass
