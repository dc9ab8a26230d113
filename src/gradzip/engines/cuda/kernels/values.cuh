// What each mode maps a value to: floors, q(x) of docs/format.md, and how many bits of it go through the lanes.

// A block of a tensor, with what its floors are made of.
template <class F, int FLOOR>
struct Source {
    typedef typename F::Bits Bits;
    const Bits* x;
    const u32* theta;
    const u32* second;
    const i8* given;
    int c0, c1, c2, shift;

    __device__ __forceinline__ Source(const Args& a, const Tensor& t, u64 start)
        : x(pointer<const Bits>(t.values) + start), theta(pointer<const u32>(t.floors) + start),
          second(pointer<const u32>(t.second) + start), given(pointer<const i8>(t.floors) + start), c0(t.c0), c1(t.c1),
          c2(t.c2), shift(a.shift) {}
    __device__ __forceinline__ void move(long long by) {
        x += by;
        if (FLOOR == kInt8Floor) given += by;
        else theta += by, second += by;
    }
};

// What a value's floor is made of. Loading it and making it are apart, so that the memory may take its time.
struct FloorInput {
    u32 first, second;
};

template <class F, int FLOOR>
DEVICE FloorInput load_floor(const Source<F, FLOOR>& s, u32 i) {
    if (FLOOR == kInt8Floor) return {(u32)(int)s.given[i], 0};
    if (FLOOR == kThetaFloor) return {__ldcs(s.theta + i), 0};
    if (FLOOR == kSecondFloor) return {__ldcs(s.theta + i), __ldcs(s.second + i)};
    return {0, 0};
}

template <class F, int FLOOR>
DEVICE int make_floor(const Source<F, FLOOR>& s, FloorInput in) {
    if (FLOOR == kInt8Floor) return (int)in.first == -128 ? kExact : min_int((int)in.first + s.shift, kCoarsest);
    int theta = (in.first >> 23) & 255;
    int f = theta + s.c0;
    if (FLOOR == kSecondFloor) f += max_int((int)((in.second >> 23) & 255) + s.c1, s.c2) >> 1;
    return theta == 0 || f < -127 ? kExact : min_int(f + s.shift, kCoarsest);
}

// An exponent. Shifting the sign out takes a multiplier's addition, where masking takes the busier unit that shifts.
DEVICE int exponent_alone(u32 bits) {
#if defined(__CUDA_ARCH__)
    u32 twice;
    asm("add.u32 %0, %1, %1;" : "=r"(twice) : "r"(bits));
    return (int)(twice >> 24);
#else
    return (int)((bits >> 23) & 255);
#endif
}

// The grid of a floor f: the bits of 2^(f+23), whose last place is 2^f. 0 stands for kExact: no value is below.
template <class F, int FLOOR>
DEVICE u32 make_grid(const Source<F, FLOOR>& s, FloorInput in) {
    constexpr int kUp = 150;
    if (FLOOR == kInt8Floor)
        return (int)in.first == -128 ? 0 : (u32)min_int((int)in.first + (s.shift + kUp), kCoarsest + kUp) << 23;
    int theta = exponent_alone(in.first), f = theta;  // less c0, which is added where it costs nothing
    if (FLOOR == kSecondFloor) f += max_int(exponent_alone(in.second) + s.c1, s.c2) >> 1;
    u32 grid = (u32)min_int(f + (s.c0 + s.shift + kUp), kCoarsest + kUp) << 23;
    return theta == 0 || f < -127 - s.c0 ? 0 : grid;
}

template <class F, int FLOOR>
DEVICE int floor_at(const Source<F, FLOOR>& s, u32 i) { return make_floor(s, load_floor(s, i)); }

// A mapped value, its exponent and its lane bits; `width` is 0 for zeros.
struct Mapped {
    u32 bits, e;
    int width;
};

DEVICE u32 quiet(u32 v) { return (v << 1) > 0xff000000u ? (v & 0x80000000u) | 0x7fc00000u : v; }

// Rounds to a grid, ties to even: adding it makes its last place that of the sum, so that rounding is the adder's work. NaN
// stays what it is, and so do values with exponent 0 where the floor is kExact: who writes them sees to it.
DEVICE u32 round_to(u32 v, u32 grid) {
    float step = __uint_as_float(grid | (v & 0x80000000u));
    u32 rounded = __float_as_uint(__fsub_rn(__fadd_rn(__uint_as_float(v), step), step));
    return fabsf(__uint_as_float(v)) < __uint_as_float(grid) ? rounded : v;
}

// kExact makes the grid negative, so that no value is below it.
DEVICE u32 round_near(u32 v, int f) { return round_to(v, (u32)(f + 150) << 23); }

DEVICE int near_width(u32 e, int f) { return min_int((int)e - 126 - f, 24); }
// The same from the exponent where it lies in a float, and the grid.
DEVICE int width_above(u32 exponent, u32 grid) {
    int width = (min_int((int)(exponent - grid), 0) >> 23) + 24;
#if defined(__CUDA_ARCH__)
    asm("" : "+r"(width));  // or else sums with it are made from what it is made of, one instruction longer
#endif
    return width;
}

DEVICE Mapped map_near(u32 v, int f) {
    u32 q = round_near(v, f), e = (q >> 23) & 255;
    return {e ? q : 0, e, e ? near_width(e, f) : 0};
}

DEVICE int paper_level(int e, int reach) {
    int span = reach - (e - 127) - 1;
    return e == 255 ? 0 : (span >= 6) + (span >= 12) + (span >= 18);
}

DEVICE Mapped map_paper(u32 v, int reach) {
    int e = (v >> 23) & 255;
    int cut = 6 * paper_level(e, reach);
    return {e ? v & (kAll << cut) : 0, (u32)e, e ? 24 - cut : 0};
}

template <int CODING>
DEVICE Mapped map_lanes(u32 v, int f) { return CODING == kPaper ? map_paper(v, f) : map_near(v, f); }

// keep=k: v becomes (v + up + (v >> cut & odd)) & mask where that stays finite; the host makes these four from k.
DEVICE u32 map_keep(u32 v, const Args& a) {
    u32 magnitude = v & 0x7fffffffu;
    u32 r = (magnitude + (u32)a.up + ((magnitude >> a.cut) & (u32)a.odd)) & (u32)a.mask;
    if (r >= 0x7f800000u) r = magnitude < 0x7f800000u ? magnitude & (u32)a.mask : quiet(magnitude);
    return magnitude < 0x800000u ? 0 : r | (v & 0x80000000u);
}

// The same for values that stay far from infinity; `top` grows to the largest result, which tells whether they did.
DEVICE u32 map_keep_finite(u32 v, const Args& a, u32& top) {
    u32 magnitude = v & 0x7fffffffu;
    u32 r = (magnitude + (u32)a.up + ((magnitude >> a.cut) & (u32)a.odd)) & (u32)a.mask;
    top = r > top ? r : top;
    return magnitude < 0x800000u ? 0 : r | (v & 0x80000000u);
}

template <class F, bool KEEP>
DEVICE u32 map_fixed(u32 v, const Args& a) { return KEEP ? map_keep(v, a) : v; }

// How many mantissa bits of a value with that exponent and floor are kept (near mode).
DEVICE int kept_bits(int e, int f) { return e == 255 ? 23 : max_int(0, min_int(23, e - 127 - f)); }

// How far an exponent lies above the floor: d of the sparse form.
DEVICE int distance(int e, int f) { return e - 127 - max_int(f, -128); }

// --- Four neighbours at a time -------------------------------------------------------------------------------------

struct Four {
    u32 v[4];
};

template <class F>
DEVICE Four load_four(const typename F::Bits* x, u32 i, bool aligned) {
    Four four;
    if (aligned && F::kItem == 4) {
        uint4 w = *(const uint4*)(x + i);
        four = {{w.x, w.y, w.z, w.w}};
    } else if (aligned) {
        uint2 w = *(const uint2*)(x + i);
        four = {{w.x & 0xffff, w.x >> 16, w.y & 0xffff, w.y >> 16}};
    } else {
        for (int c = 0; c < 4; c++) four.v[c] = x[i + c];
    }
    return four;
}

template <class F>
DEVICE void store_four(typename F::Bits* x, u32 i, Four f, bool aligned) {
    if (aligned && F::kItem == 4)
        *(uint4*)(x + i) = make_uint4(f.v[0], f.v[1], f.v[2], f.v[3]);
    else if (aligned)
        *(uint2*)(x + i) = make_uint2(f.v[0] | f.v[1] << 16, f.v[2] | f.v[3] << 16);
    else
        for (int c = 0; c < 4; c++) x[i + c] = (typename F::Bits)f.v[c];
}

template <class F>
DEVICE bool can_load_four(const void* x) { return (u64)x % (4 * F::kItem) == 0; }

// Byte J of four words as one word.
template <int J>
DEVICE u32 bytes_of(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, J | (4 + J) << 4), __byte_perm(c, d, J | (4 + J) << 4), 0x5410);
}
