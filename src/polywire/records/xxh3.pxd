# C declarations of xxh3.py for the other compiled modules, and the only multiplication that needs 128 bits.

cdef extern from *:
    """
    static inline unsigned long long polywire_fold(unsigned long long a, unsigned long long b) {
    #if defined(__SIZEOF_INT128__)
        unsigned __int128 product = (unsigned __int128)a * b;
        return (unsigned long long)product ^ (unsigned long long)(product >> 64);
    #else
        unsigned long long low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
        unsigned long long left = (a >> 32) * (b & 0xFFFFFFFFu);
        unsigned long long right = (a & 0xFFFFFFFFu) * (b >> 32);
        unsigned long long high = (a >> 32) * (b >> 32);
        unsigned long long middle = (low >> 32) + (left & 0xFFFFFFFFu) + right;
        return ((middle << 32) | (low & 0xFFFFFFFFu)) ^ ((left >> 32) + (middle >> 32) + high);
    #endif
    }
    """
    unsigned long long multiply_fold "polywire_fold"(unsigned long long a, unsigned long long b) noexcept nogil


cdef unsigned long long xxh3_raw(const unsigned char *p, Py_ssize_t at, Py_ssize_t size) noexcept nogil
