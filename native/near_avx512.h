// Near mode with AVX-512: floors, rounding and lanes of a row at a time, without a detour through memory.
// 32 values are two vectors of 32-bit words where they are floats, and one vector of 16-bit words, in the order of the
// lanes, everywhere else. Included like values.h.

constexpr int kRows = kBlock / kLanes;
constexpr int kRowBytes = 4 * kLanes;  // two cache lines

#define GZ_ALWAYS __attribute__((always_inline))
#define GZ_INLINE GZ_ALWAYS inline

// Rounding must not depend on what the caller made of the control register; subnormals have to count as zeros.
struct FloatMode {
    unsigned before = _mm_getcsr();
    FloatMode() { _mm_setcsr(0x1fc0); }  // exceptions masked, to nearest even, subnormal operands are zeros
    ~FloatMode() { _mm_setcsr(before); }
};

// Indices for permutations of words.
inline __m512i count_words(int first, int step) {
    alignas(64) uint16_t index[32];
    for (int i = 0; i < 32; i++) index[i] = uint16_t(first + step * i);
    return _mm512_load_si512(index);
}

// The grids of a row: 150 + floor, which is the exponent field of 2^(floor + 23), or 0 where values stay exact.
enum class Grid { kGiven, kTheta, kSecond };
struct Grids {
    const int8_t* given;
    const float *theta, *second;
    __m512i c0, c1, c2, least, odd;

    // False if the rule does not fit 16 bits.
    static bool fits(const gz_floor& rule) {
        auto small = [](int c) { return c > -8192 && c < 8192; };
        return rule.given || (small(rule.c0) && small(rule.c1) && small(rule.c2));
    }
    explicit Grids(const FloorSource& from) {
        const gz_floor& rule = *from.rule;
        given = rule.given ? rule.given + from.start : nullptr;
        theta = rule.theta ? rule.theta + from.start : nullptr;
        second = rule.second ? rule.second + from.start : nullptr;
        c0 = _mm512_set1_epi16(short((given ? 0 : rule.c0) + 150 + from.shift));
        c1 = _mm512_set1_epi16(short(rule.c1));
        c2 = _mm512_set1_epi16(short(rule.c2));
        least = _mm512_set1_epi16(short(150 - 127 + from.shift));
        odd = count_words(1, 2);
    }
    Grid kind() const { return given ? Grid::kGiven : second ? Grid::kSecond : Grid::kTheta; }

    __m512i exponents(const float* x, int at) const {
        __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(x + at), odd, _mm512_loadu_si512(x + at + 16));
        return _mm512_and_si512(_mm512_srli_epi16(high, 7), _mm512_set1_epi16(255));
    }
    template <Grid Kind>
    __m512i row(int at) const {
        const __m512i coarsest = _mm512_set1_epi16(150 + kCoarsest);
        if (Kind == Grid::kGiven) {
            __m512i f = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(given + at)));
            f = _mm512_add_epi16(f, c0);
            return _mm512_maskz_min_epi16(_mm512_cmpge_epi16_mask(f, least), f, coarsest);
        }
        __m512i e = exponents(theta, at), f = _mm512_add_epi16(e, c0);
        if (Kind == Grid::kSecond)
            f = _mm512_add_epi16(f, _mm512_srai_epi16(_mm512_max_epi16(_mm512_add_epi16(exponents(second, at), c1), c2), 1));
        return _mm512_maskz_min_epi16(_mm512_mask_cmpge_epi16_mask(_mm512_test_epi16_mask(e, e), f, least), f, coarsest);
    }
};

// Calls that one of a function's forms which the grids need.
#define GZ_FOR_GRID(grids, function, ...)                                      \
    ((grids).kind() == Grid::kGiven   ? function<Grid::kGiven>(__VA_ARGS__)    \
     : (grids).kind() == Grid::kTheta ? function<Grid::kTheta>(__VA_ARGS__)    \
                                      : function<Grid::kSecond>(__VA_ARGS__))

// A row on its grid: the lane parts of 32 values.
struct NearRow {
    __m512i e, width;   // exponent; bits that go through the lane
    __m512i low, high;  // those bits
    __mmask32 nonzero;
};

struct NearMapper {
    __m512i odd = count_words(1, 2), even = count_words(0, 2), first, last;
    NearMapper() {
        alignas(64) uint16_t twice[32];
        for (int i = 0; i < 32; i++) twice[i] = uint16_t(i / 2);
        first = _mm512_load_si512(twice);
        last = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    }
    // Adding and subtracting C = 2^(f+23) rounds |x| < C to a multiple of 2^f, ties to even; larger |x| are on the grid
    // already, and so are values with C = 0. What rounds to zero becomes +0.
    static __m512i round(__m512i x, __m512i c) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7fffffff));
        const __mmask16 below = _mm512_cmplt_epi32_mask(magnitude, c);
        const __m512 like_x = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(c, x, _mm512_set1_epi32(int(0x80000000u)), 0xf8));
        const __m512 sum = _mm512_add_round_ps(_mm512_castsi512_ps(x), like_x, nearest);
        return _mm512_castps_si512(_mm512_mask_sub_round_ps(_mm512_castsi512_ps(x), below, sum, like_x, nearest));
    }
    // Sign and mantissa side by side.
    static __m512i field(__m512i q) { return select(_mm512_set1_epi32(0x7fffff), q, _mm512_srli_epi32(q, 8)); }

    struct Rounded {
        __m512i a, b, grid;
    };
    GZ_INLINE Rounded round(const uint32_t* x, __m512i grid) const {
        const __m512i c = _mm512_slli_epi16(grid, 7);  // the upper half of a float
        return {round(_mm512_loadu_si512(x), _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, c)),
                round(_mm512_loadu_si512(x + 16), _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, last, c)), grid};
    }
    GZ_INLINE NearRow split(const Rounded& q) const {
        const __m512i qa = q.a, qb = q.b, grid = q.grid;
        NearRow row;
        const __m512i top = _mm512_permutex2var_epi16(qa, odd, qb);
        row.e = _mm512_and_si512(_mm512_srli_epi16(top, 7), _mm512_set1_epi16(255));
        row.nonzero = _mm512_test_epi16_mask(row.e, row.e);
        const __m512i cut = _mm512_subs_epu16(grid, row.e);  // 23 - kept bits
        row.width = _mm512_maskz_sub_epi16(row.nonzero, _mm512_set1_epi16(24), cut);
        const __m512i pa = _mm512_srlv_epi32(field(qa), _mm512_maskz_permutexvar_epi16(0x55555555u, first, cut));
        const __m512i pb = _mm512_srlv_epi32(field(qb), _mm512_maskz_permutexvar_epi16(0x55555555u, last, cut));
        row.low = _mm512_maskz_permutex2var_epi16(row.nonzero, pa, even, pb);
        row.high = _mm512_maskz_permutex2var_epi16(row.nonzero, pa, odd, pb);
        return row;
    }
};

// The exponents of a block's sampled rows. Not inlined, like push_near.
template <Grid Kind>
__attribute__((noinline)) void sample_rows(const BlockIn& in, const Grids& grids, uint8_t* exponent) {
    const NearMapper mapper;
    const uint32_t* x = static_cast<const uint32_t*>(in.values);
    for (int row = 0; row < kRows; row += kSampleRows) {
        const NearRow r = mapper.split(mapper.round(x + row * kLanes, grids.row<Kind>(row * kLanes)));
        store_row(exponent + row * kLanes / kSampleRows, _mm512_cvtepi16_epi8(r.e));
    }
}

// Writes the sampled exponents of a whole block; 0 if they have to be found otherwise.
inline int sample_near(const BlockIn& in, uint8_t* exponent) {
    if (in.n != kBlock || !Grids::fits(*in.floors.rule)) return 0;
    const FloatMode mode;
    const Grids grids(in.floors);
    GZ_FOR_GRID(grids, sample_rows, in, grids, exponent);
    return kSampled;
}

// 64 entries of a code table, around the base, in two registers; what is rarer is looked up one by one.
struct CodeWindow {
    alignas(64) uint16_t entries[256];  // by exponent
    int from;
    __m512i part[2], zero;

    CodeWindow(const CodeTable& table, int base) {
        entries_by_exponent(table, base, entries);
        from = base < 40 ? 0 : base > 232 ? 192 : base - 40;
        part[0] = _mm512_loadu_si512(entries + from);
        part[1] = _mm512_loadu_si512(entries + from + 32);
        zero = _mm512_set1_epi16(short(entries[0]));
    }
    __m512i look_up(const NearRow& r) const {
        const __m512i index = _mm512_sub_epi16(r.e, _mm512_set1_epi16(short(from)));
        __m512i entry = _mm512_mask_mov_epi16(zero, r.nonzero, _mm512_permutex2var_epi16(part[0], index, part[1]));
        const __mmask32 outside = _mm512_mask_cmpge_epu16_mask(r.nonzero, index, _mm512_set1_epi16(64));
        if (__builtin_expect(outside != 0, 0)) {
            alignas(64) uint16_t e[kLanes], all[kLanes];
            _mm512_store_si512(e, r.e);
            for (int i = 0; i < kLanes; i++) all[i] = entries[e[i]];
            entry = _mm512_load_si512(all);
        }
        return entry;
    }
};

// Fetches what will be read half a block later, in this block or in the next; rows go up (direction 1) or down (-1).
GZ_INLINE void fetch_ahead(const Ahead& ahead, int row, int direction) {
    const bool here = direction > 0 ? row < kRows / 2 : row >= kRows / 2;
    const int soon = row + kRows / 2 * direction - (here ? kRows : kRows * direction);  // counted from the next block's first
    for (int i = 0; i < 3 && ahead.next[i]; i++)
        for (int line = 0; line < kRowBytes; line += 64) __builtin_prefetch(ahead.next[i] + kRowBytes * soon + line, 0, 2);
    static_assert(kSampleAhead == 4, "every fourth row one of 32 sampled ones, in two steps");
    if (row % 4 < 2)
        for (int i = 0; i < 3 && ahead.sample[i]; i++)
            __builtin_prefetch(ahead.sample[i] + kRowBytes * (row / 4 * kSampleRows) + 64 * (row % 2), 0, 2);
}

struct NearEnd {
    __m512i states;
    uint8_t* out;
    uint32_t nonzero, escapes;
    bool special;  // infinities or NaN
};

// The rows of one block, last to first. Not inlined: it must stay between the changes of the float mode.
template <Grid Kind>
__attribute__((noinline)) NearEnd push_near(const BlockIn& in, const Grids& grids, const CodeWindow& codes, uint8_t* out) {
    const NearMapper mapper;
    const uint32_t* x = static_cast<const uint32_t*>(in.values);
    const __m512i eight = _mm512_set1_epi16(8), low_byte = _mm512_set1_epi16(255);
    __m512i state = _mm512_set1_epi16(256), highest = _mm512_setzero_si512();
    uint32_t nonzero = 0, escapes = 0;
    constexpr int last = kBlock - kLanes;
    // Three rows are at work beside the one that is pushed, each a stage behind the other, because one row's latencies
    // are more than the processor can look beyond.
    __m512i grid = grids.row<Kind>(last - 2 * kLanes);
    NearMapper::Rounded rounded = mapper.round(x + last - kLanes, grids.row<Kind>(last - kLanes));
    NearRow next = mapper.split(mapper.round(x + last, grids.row<Kind>(last)));
    for (int row = kRows - 1; row >= 0; row--) {
        fetch_ahead(in.ahead, row, -1);
        __builtin_prefetch(out + 1024, 1);
        __builtin_prefetch(out + 1024 + 64, 1);
        const NearRow r = next;
        next = mapper.split(rounded);
        rounded = mapper.round(x + (row > 1 ? (row - 2) * kLanes : 0), grid);
        grid = grids.row<Kind>(row > 2 ? (row - 3) * kLanes : 0);
        highest = _mm512_max_epu16(highest, r.e);
        nonzero += uint32_t(__builtin_popcount(r.nonzero));
        const __m512i third = _mm512_subs_epu16(r.width, _mm512_set1_epi16(16));
        if (_mm512_test_epi16_mask(third, third)) push(state, r.high, third, out);
        const __m512i second = _mm512_min_epu16(_mm512_subs_epu16(r.width, eight), eight);
        if (_mm512_test_epi16_mask(second, second)) push(state, _mm512_srli_epi16(r.low, 8), second, out);
        push(state, _mm512_and_si512(r.low, low_byte), _mm512_min_epu16(r.width, eight), out);
        __m512i entry = codes.look_up(r);
        const __mmask32 escaped = _mm512_movepi16_mask(entry);
        if (__builtin_expect(escaped != 0, 0)) {
            escapes |= escaped;
            push(state, _mm512_maskz_mov_epi16(escaped, r.e), _mm512_maskz_set1_epi16(escaped, 8), out);
            entry = _mm512_and_si512(entry, _mm512_set1_epi16(0x7fff));
        }
        push(state, _mm512_and_si512(entry, low_byte), _mm512_srli_epi16(entry, 8), out);
    }
    return {state, out, nonzero, escapes, _mm512_cmpeq_epi16_mask(highest, low_byte) != 0};
}

// The values of a block that is mostly zero, in one pass as well; false if it is not, or if it has NaN in it.
template <Grid Kind>
__attribute__((noinline)) bool gather_near(const BlockIn& in, const Grids& grids, SparseValues& v) {
    const NearMapper mapper;
    const uint32_t* x = static_cast<const uint32_t*>(in.values);
    __m512i highest = _mm512_setzero_si512(), position = count_words(0, 1);
    for (int row = 0; row < kRows; row++, position = _mm512_add_epi16(position, _mm512_set1_epi16(kLanes))) {
        fetch_ahead(in.ahead, row, +1);
        const __m512i grid = grids.row<Kind>(row * kLanes);
        const NearRow r = mapper.split(mapper.round(x + row * kLanes, grid));
        if (!r.nonzero) continue;
        highest = _mm512_max_epu16(highest, r.e);
        // A grid of 0 stands for the floor -128, which would be 22.
        const __m512i floor = _mm512_max_epu16(grid, _mm512_set1_epi16(150 + kExact));
        const __m512i distance = _mm512_sub_epi16(_mm512_add_epi16(r.e, _mm512_set1_epi16(150 - 127)), floor);
        if (v.m > kBlock / 2) return false;
        auto keep = [&](uint16_t* to, __m512i words) { _mm512_storeu_si512(to + v.m, _mm512_maskz_compress_epi16(r.nonzero, words)); };
        keep(v.position, position);
        keep(v.exponent, r.e);
        keep(v.distance, distance);
        keep(v.width, r.width);
        keep(v.low, r.low);
        keep(v.high, r.high);
        v.m += __builtin_popcount(r.nonzero);
    }
    return 2 * v.m <= kBlock && !_mm512_cmpeq_epi16_mask(highest, _mm512_set1_epi16(255));
}

Sample sample_block(const BlockIn& in, uint32_t (*counts)[256], Scratch& scratch);
int decode_near(const BlockData* block, int count, const Target* target, const Ahead& ahead, uint32_t* done);

// A whole block in one pass; false where it has to be done otherwise.
inline bool encode_near(const BlockIn& in, uint8_t* out, Scratch& scratch, BlockOut* result) {
    if (in.n != kBlock || !Grids::fits(*in.floors.rule)) return false;
    const Sample sample = in.sample ? *in.sample : sample_block(in, nullptr, scratch);
    const Grids grids(in.floors);
    if (sample.nonzero < kSampled * 7 / 16) {
        const FloatMode mode;
        SparseValues values;
        if (!GZ_FOR_GRID(grids, gather_near, in, grids, values)) return false;
        const int size = values.m ? encode_sparse(values, kBlock, *in.table, sample.base, out) : 0;
        *result = {kSparse, size};
        return size >= 0;
    }
    if (sample.alike || sample.nonzero < kSampled * 9 / 16) return false;
    const CodeWindow codes(*in.table, sample.base);
    const FloatMode mode;
    const NearEnd end = GZ_FOR_GRID(grids, push_near, in, grids, codes, out + kDenseHead);
    const int size = int(end.out - out), padding = -size & 3;
    if (end.special || 2 * end.nonzero <= kBlock || size + padding >= 4 * kBlock) return false;
    std::memset(end.out, 0, size_t(padding));
    _mm512_storeu_si512(out + 4, end.states);
    store32(out, 1u << 5 | uint32_t(end.escapes != 0) << 6 | uint32_t(sample.base) << 8 | end.nonzero << 16 | uint32_t(padding) << 30);
    *result = {kDense, size + padding};
    return true;
}
