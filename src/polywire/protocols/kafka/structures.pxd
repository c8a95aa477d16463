# C-level face of structures.py for the other compiled modules; it holds declarations only.


cdef class Program:
    cdef object record
    cdef tuple steps
    cdef tuple tagged
    cdef tuple defaults
    cdef bint flexible
    cdef long long bytes_min


cdef class Step:
    cdef str name
    cdef int kind
    cdef bint is_array
    cdef bint nullable
    cdef long long tag
    cdef object default
    cdef Program program
    cdef long long bytes_min
    cdef long long element_bytes_min
