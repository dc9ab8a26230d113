// Runs CUDA kernels on a CPU, one group of threads after the other: threads are fibers that take turns where they have to
// meet, so that votes, shuffles and barriers do what they do on a GPU. A thread that does not come is an error, not a hang.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

struct Index { unsigned x; };
inline Index thread, block, grid;

struct Meeting {  // of the threads of a warp, or of a group
    int expected = 0, arrived = 0;
    unsigned held = 0;  // how many meetings there were
    const char* what = nullptr;
    uint64_t offered[32], seen[32];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    const unsigned* waits_for = nullptr;  // a count of meetings that must differ from...
    unsigned since = 0;                   // ...this
    bool done = false;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting everyone;
inline void (*body)(const void*);
inline const void* argument;

[[noreturn]] inline void fail(const char* why, const char* what) {
    std::fprintf(stderr, "emulator: %s at %s, group %u, thread %u\n", why, what ? what : "?", block.x, thread.x);
    std::abort();
}

inline void hold(Meeting& m) {
    std::memcpy(m.seen, m.offered, sizeof m.seen);
    m.arrived = 0;
    m.held++;
}

inline void meet(Meeting& m, const char* what) {
    if (m.arrived && std::strcmp(m.what, what)) fail("threads meet at different calls", what);
    m.what = what;
    if (++m.arrived == m.expected) {
        hold(m);
        return;
    }
    unsigned me = thread.x;
    fibers[me].waits_for = &m.held;
    fibers[me].since = m.held;
    swapcontext(&fibers[me].context, &scheduler);
    fibers[me].waits_for = nullptr;
}

// Gives the other threads a turn.
inline void yield() {
    unsigned me = thread.x;
    swapcontext(&fibers[me].context, &scheduler);
}

inline Meeting& my_warp() { return warps[thread.x / 32]; }

inline Meeting& exchange(uint64_t value, const char* what) {
    Meeting& m = my_warp();
    m.offered[thread.x % 32] = value;
    meet(m, what);
    return m;
}

inline void enter() {
    unsigned me = thread.x;
    body(argument);
    fibers[me].done = true;
    Meeting& m = warps[me / 32];
    if (--m.expected && m.arrived == m.expected) fail("part of a warp has left", m.what);
    if (--everyone.expected && everyone.arrived == everyone.expected) hold(everyone);
    swapcontext(&fibers[me].context, &scheduler);
}

inline void run_group(unsigned threads) {
    fibers.clear();
    fibers.resize(threads);
    warps.assign(threads / 32, Meeting());
    for (Meeting& m : warps) m.expected = 32;
    everyone = Meeting();
    everyone.expected = int(threads);
    constexpr size_t kStack = 1 << 16;
    for (Fiber& f : fibers) {
        f.stack.reset(new char[kStack]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = kStack;
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    for (unsigned left = threads; left;) {
        bool moved = false;
        for (unsigned i = 0; i < threads; i++) {
            Fiber& f = fibers[i];
            if (f.done || (f.waits_for && *f.waits_for == f.since)) continue;
            thread.x = i;
            swapcontext(&scheduler, &f.context);
            left -= f.done;
            moved = true;
        }
        if (!moved) fail("threads wait for each other", everyone.arrived ? everyone.what : warps[0].what);
    }
}

inline void launch(void (*kernel)(const void*), const void* args, unsigned groups, unsigned threads) {
    body = kernel;
    argument = args;
    grid.x = groups;
    for (block.x = 0; block.x < groups; block.x++) run_group(threads);
}

}  // namespace emulator

alignas(16) inline unsigned char dynamic_shared[1 << 18];

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid

inline void __syncthreads() { emulator::meet(emulator::everyone, "__syncthreads"); }
inline void __syncwarp() { emulator::exchange(0, "__syncwarp"); }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}

inline unsigned __ballot_sync(unsigned, bool flag) {
    emulator::Meeting& m = emulator::exchange(flag, "__ballot_sync");
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= unsigned(m.seen[i] & 1) << i;
    return votes;
}
inline bool __any_sync(unsigned mask, bool flag) { return __ballot_sync(mask, flag) != 0; }
template <class T>
T __shfl_sync(unsigned, T v, int from) { return T(emulator::exchange(uint64_t(v), "__shfl_sync").seen[from & 31]); }
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
    unsigned me = threadIdx.x % 32;
    return T(emulator::exchange(uint64_t(v), "__shfl_xor_sync").seen[me ^ unsigned(mask)]);
}
template <class T>
T __shfl_up_sync(unsigned, T v, unsigned by) {
    unsigned me = threadIdx.x % 32;
    return T(emulator::exchange(uint64_t(v), "__shfl_up_sync").seen[me >= by ? me - by : me]);
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = uint64_t(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return by >= 32 ? high : unsigned((uint64_t(high) << 32 | low) >> by);
}
inline float __uint_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; std::memcpy(&v, &f, 4); return v; }
// A GPU has one NaN for all results, whatever the operands' bits; a CPU keeps those.
inline float with_gpu_nan(float v) {
    const unsigned nan = 0x7fffffffu;
    if (v != v) memcpy(&v, &nan, sizeof v);
    return v;
}
inline float __fadd_rn(float a, float b) { return with_gpu_nan(a + b); }
inline float __fmul_rn(float a, float b) { return with_gpu_nan(a * b); }
inline float __fsub_rn(float a, float b) { return with_gpu_nan(a - b); }
inline float __fdiv_rn(float a, float b) { return with_gpu_nan(a / b); }
inline float __fmaf_rn(float a, float b, float c) { return with_gpu_nan(std::fma(a, b, c)); }
inline float __saturatef(float v) { return v > 0.0f ? v < 1.0f ? v : 1.0f : 0.0f; }
inline int __float2int_rz(float v) { return v != v ? 0 : v >= 2147483648.0f ? INT32_MAX : v < -2147483648.0f ? INT32_MIN : int(v); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T v) { *p = v; }
template <class T>
T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
template <class T>
T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <class T>
T atomicMax(T* p, T v) { T old = *p; *p = old > v ? old : v; return old; }

inline float emulated_half_value(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
inline unsigned emulated_half_bits(float value) { _Float16 h = _Float16(value); unsigned short b; std::memcpy(&b, &h, 2); return b; }
