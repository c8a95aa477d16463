# C-level face of shared_chunk.py for the other compiled modules; it holds declarations only.

cdef class SharedChunk:
    cdef object _arena
    cdef object _chunk
    cdef object _view
    cdef public object lent
    cdef public Py_ssize_t lent_at
    cdef public Py_ssize_t position
    cdef public object reader
