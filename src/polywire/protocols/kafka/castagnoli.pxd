# CRC-32C with the processor's instruction. It is written in C, because Cython cannot express the instruction (decision 0117). crc32c.py checks
# whether the processor has it, and otherwise uses tables.
#
# The instruction has a latency of three cycles but can start in every cycle. Therefore three blocks of the data are processed in parallel, and
# their CRCs are combined. Multiply the CRC of a block by x^(8 n - 33) modulo the polynomial and apply the instruction to the product: the result
# is the CRC of the block followed by n zero bytes. (The exponent is 33 too small on purpose: the 64-bit product of reflected numbers contributes
# one power of x, and the instruction 32.)

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__)
    #include <immintrin.h>
    #include <string.h>

    static int crc32c_instruction(void) { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

    #define CRC32C_TARGET __attribute__((target("sse4.2,pclmul")))

    CRC32C_TARGET static inline unsigned long long crc32c_word(const unsigned char *p)
    {
        unsigned long long x;
        memcpy(&x, p, 8);
        return x;
    }

    CRC32C_TARGET static inline unsigned long long crc32c_behind(unsigned long long crc, unsigned int power)
    {
        const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(crc), _mm_cvtsi32_si128(power), 0x00);
        return _mm_crc32_u64(0, _mm_cvtsi128_si64(product));
    }

    CRC32C_TARGET static inline unsigned long long crc32c_three(
        unsigned long long a, const unsigned char *p, Py_ssize_t size, unsigned int two, unsigned int one)
    {
        unsigned long long b = 0, c = 0;
        Py_ssize_t i;
        for (i = 0; i < size; i += 8) {
            a = _mm_crc32_u64(a, crc32c_word(p + i));
            b = _mm_crc32_u64(b, crc32c_word(p + size + i));
            c = _mm_crc32_u64(c, crc32c_word(p + 2 * size + i));
        }
        return crc32c_behind(a, two) ^ crc32c_behind(b, one) ^ c;
    }

    CRC32C_TARGET static unsigned int crc32c_chains(const unsigned char *p, Py_ssize_t size)
    {
        unsigned long long crc = 0xffffffff;
        for (; size >= 3 * 1024; p += 3 * 1024, size -= 3 * 1024)
            crc = crc32c_three(crc, p, 1024, 0xa51b6135, 0x170076fa);
        for (; size >= 3 * 128; p += 3 * 128, size -= 3 * 128)
            crc = crc32c_three(crc, p, 128, 0xb9e02b86, 0x0d3b6092);
        for (; size >= 8; p += 8, size -= 8)
            crc = _mm_crc32_u64(crc, crc32c_word(p));
        for (; size > 0; p++, size--)
            crc = _mm_crc32_u8((unsigned int)crc, *p);
        return ~(unsigned int)crc;
    }
    #else
    static int crc32c_instruction(void) { return 0; }
    static unsigned int crc32c_chains(const unsigned char *p, Py_ssize_t size) { return 0; }
    #endif
    """
    bint crc32c_instruction() noexcept nogil
    unsigned int crc32c_chains(const unsigned char *p, Py_ssize_t size) noexcept nogil
