// How the processor rounds while codecs work whose bits must not depend on what the caller has set.
#ifndef GRADZIP_FLOAT_MODE_H
#define GRADZIP_FLOAT_MODE_H
#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gz {

// Rounds to nearest and keeps subnormals while it lives, whatever the caller has set.
class FloatMode {
#if defined(__SSE2__)
    unsigned before_ = _mm_getcsr();

   public:
    FloatMode() { _mm_setcsr(0x1f80); }
    ~FloatMode() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    uint64_t before_;

   public:
    FloatMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
    }
    ~FloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }
#else
   public:
    FloatMode() {}
    ~FloatMode() {}
#endif
};

}  // namespace gz
#endif
