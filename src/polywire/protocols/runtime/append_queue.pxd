# C-level face of append_queue.py for the other compiled modules; it holds declarations only.

cdef class AppendQueue:
    cdef object _broker
    cdef object _emptied
    cdef object _refuse
    cdef object _timer
    cdef double _until
    cdef double _wait_s
    cdef public object waiting

    cpdef object produce(self, object partition, bytearray batch, object level, object done, object by=*)
