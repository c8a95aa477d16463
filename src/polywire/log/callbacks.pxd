# C declarations of callbacks.py for the other compiled modules.


cdef class Notifications:
    cdef object _loop
    cdef bint _notifying
    cdef public object waiting

    cpdef object notify(self)
