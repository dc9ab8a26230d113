// The lanes of lanes.h with vectors of 32 bytes, in the words of vector_avx2.h (or its like): one byte for each lane.
// Included like values.h.
//
// A code's first four bits are found in a table of 16 entries; longer codes continue in another one for each such
// beginning. Gradients have few long codes, so that two or three small tables take the place of one of 256 entries.

// --- Encoding ---

// Pushes 0 to 8 bits in each lane. Writes up to 8 bytes behind the refill stream.
GZ_INLINE void push(States& s, Bytes bits, Bytes count, uint8_t*& out) {
    const Bytes highest = look_up(table_of(255, 127, 63, 31, 15, 7, 3, 1, 0), count);  // with room for so many more bits
    const Bytes fits = equal(larger(s.high, highest), highest);
    out = compress(out, s.low, fits ^ splat(255));
    s = shift_left({select(fits, s.low, s.high), s.high & fits}, count);
    s.low = s.low | bits;
}

// Codes by exponent: `Groups` times 16 exponents from `from` on, and 0. Others are escaped.
struct CodeWindow {
    static constexpr int kMost = 16;
    alignas(32) uint8_t code[256], count[256];  // a count of 0: escaped
    uint8_t zero_code, zero_count, escape_code, escape_count;
    int from, groups;

    CodeWindow(const CodeTable& table, int base) {
        uint16_t entry[256];
        entries_by_exponent(table, base, entry);
        from = base + table.lowest;
        groups = (table.highest - table.lowest) / 16 + 1;
        if (from < 1 || base + table.highest > 255 || groups > 4) {  // too many, or beyond 255 and back to 1
            from = 0;
            groups = kMost;
        }
        if (from + 16 * groups > 256) from = 256 - 16 * groups;
        for (int i = 0; i < 16 * groups; i++) {
            code[i] = uint8_t(entry[from + i]);
            count[i] = entry[from + i] & (kEscaped << 8) ? 0 : entry[from + i] >> 8 & 15;
        }
        zero_code = uint8_t(entry[0]);
        zero_count = entry[0] & (kEscaped << 8) ? 0 : entry[0] >> 8 & 15;
        escape_code = escape_count = 0;
        for (int i = 0; i < 256; i++)
            if (table.length[i] & kEscaped) {
                escape_code = table.code[i];
                escape_count = table.length[i] & 15;
                break;
            }
    }
    template <int Groups>
    GZ_INLINE void look_up_codes(Bytes e, Bytes* codes, Bytes* counts) const {
        const Bytes index = e - splat(from), zero = equal(e, splat(0));
        *codes = *counts = splat(0);
        for (int g = 0; g < Groups; g++) {
            const Bytes here = within_16(index ^ splat(16 * g));
            *codes = *codes | look_up(table_of(code + 16 * g), here);
            *counts = *counts | look_up(table_of(count + 16 * g), here);
        }
        *codes = select(zero, splat(zero_code), *codes);
        *counts = select(zero, splat(zero_count), *counts);
    }
};

// One block's lanes while encoding.
struct Writer {
    States s{splat(0), splat(1)};
    uint8_t* out;
    bool escapes = false;

    // A row; fewer than 32 values only if it is not whole.
    template <int Groups, bool Whole>
    GZ_INLINE void row(const LaneInput& in, const CodeWindow& window, int start) {
        const Bytes present = Whole ? splat(255) : first_lanes(in.n - start), eight = splat(8), zero = splat(0);
        const Bytes e = load(in.exponent + start);
        if (in.chunks) {
            const Bytes width = load(in.width + start) & present;
#pragma GCC unroll 3
            for (int c = 2; c >= 0; c--) {
                const Bytes count = smaller(subtract_to_zero(width, splat(8 * c)), eight);
                if (c < in.chunks && (c == 0 || any(count))) push(s, load(in.chunk[c] + start) & present, count, out);
            }
        }
        if (in.level) {
            const Bytes nonzero = without(present, equal(e, zero));
            push(s, load(in.level + start) & nonzero, splat(2) & nonzero, out);
        }
        if (in.single) return;
        Bytes code, count;
        window.look_up_codes<Groups>(e, &code, &count);
        const Bytes escaped = equal(count, zero) & present;
        if (__builtin_expect(any(escaped), 0)) {
            escapes = true;
            push(s, e & escaped, eight & escaped, out);
            code = select(escaped, splat(window.escape_code), code);
            count = select(escaped, splat(window.escape_count), count);
        }
        push(s, code & present, count & present, out);
    }
};

template <int Groups>
LaneEnd encode_lanes(const LaneInput& in, const CodeWindow& window, uint8_t* states, uint8_t* out) {
    Writer writer;
    writer.out = out;
    int row = in.n / kLanes;
    if (in.n % kLanes) writer.row<Groups, false>(in, window, row * kLanes);
    while (--row >= 0) {
        if (row % 2 == 0) in.prefetch.lines(row / 2);
        writer.row<Groups, true>(in, window, row * kLanes);
    }
    store_states(states, writer.s);
    return {writer.out, writer.escapes};
}

// `out` needs 8 bytes of slack, and the input arrays are readable up to a multiple of 32 values.
inline LaneEnd encode_lanes(const LaneInput& in, uint8_t* states, uint8_t* out) {
    const CodeWindow window(*in.table, in.base);
    switch (window.groups) {
        case 1: return encode_lanes<1>(in, window, states, out);
        case 2: return encode_lanes<2>(in, window, states, out);
        case 3: return encode_lanes<3>(in, window, states, out);
        case 4: return encode_lanes<4>(in, window, states, out);
        default: return encode_lanes<CodeWindow::kMost>(in, window, states, out);
    }
}

// --- Decoding ---

// One block's lanes. Reads may run 16 bytes over the end of the refill stream.
struct Reader {
    States s;
    const uint8_t *begin, *at;

    int start(const LaneOutput& o) {
        s = load_states(o.states);
        begin = o.refill;
        at = o.end;
        return any(equal(s.high, splat(0))) ? GZ_BAD_DENSE : 0;
    }
    // Takes a byte where a lane has none above its lowest; false if the stream runs dry.
    GZ_INLINE bool refill() {
        const Bytes small = equal(s.high, splat(0));
        at -= count_of(small);
        if (__builtin_expect(at < begin, 0)) return false;
        s.high = s.high | (s.low & small);
        s.low = without(s.low, small) | expand(at, small);
        return true;
    }
    // Pops 0 to 8 bits.
    GZ_INLINE bool pop(Bytes count, Bytes* bits) {
        *bits = s.low & look_up(table_of(0, 1, 3, 7, 15, 31, 63, 127, 255), count);
        s = shift_right_some(s, right_shifts(count));
        return refill();
    }
    bool done() const { return at == begin && !any(s.low | (s.high ^ splat(1))); }
};

// What the low byte of a state says, for the code of several blocks: by its low nibble, and where that is the beginning
// of longer codes, by its high nibble.
struct CodeTree {
    alignas(32) uint8_t symbol[17][16], shift[17][16];  // of shorter codes, then of each beginning; 0: an escape or elsewhere
    uint8_t beginning[16];                              // in the upper nibble
    int groups = 0;
    uint8_t escape_shift = 0;
    bool fits = true;  // false if a code has no bits at all

    explicit CodeTree(const CodeTable& table) {
        for (int low = 0; low < 16; low++) {
            const int consumed = table.consumed[low];
            const bool longer = (consumed & 15) > 4;
            symbol[0][low] = longer ? 0 : entry(table, low, &shift[0][low]);
            if (!longer) continue;
            shift[0][low] = 0;
            groups++;
            beginning[groups - 1] = uint8_t(low << 4);
            for (int high = 0; high < 16; high++) symbol[groups][high] = entry(table, low | high << 4, &shift[groups][high]);
        }
        for (; groups & (groups - 1); groups++) {  // to a number that there is code for
            beginning[groups] = 0;
            std::memset(symbol[groups + 1], 0, 16);
            std::memset(shift[groups + 1], 0, 16);
        }
    }

   private:
    uint8_t entry(const CodeTable& table, int index, uint8_t* to) {
        const int consumed = table.consumed[index];
        fits &= (consumed & 15) > 0;
        *to = right_shift(consumed & 15);
        if (!(consumed & kEscaped)) return table.symbol[index];
        escape_shift = *to;
        *to = 0;
        return 0;
    }
};

// A block's exponents in place of the symbols.
struct ExponentTree {
    alignas(32) uint8_t exponent[17][16];
    void make(const CodeTree& tree, int base) {
        for (int i = 0; i < 16 * (tree.groups + 1); i++)
            exponent[i / 16][i % 16] = exponent_of(tree.symbol[i / 16][i % 16], base);
    }
};

template <int Groups>
GZ_INLINE void look_up_symbols(const CodeTree& tree, const ExponentTree& exponents, Bytes low, Bytes* e, Bytes* shift) {
    const Bytes first = low_nibbles(low), swapped = swap_nibbles(low);
    *e = look_up(table_of(exponents.exponent[0]), first);
    *shift = look_up(table_of(tree.shift[0]), first);
    for (int g = 0; g < Groups; g++) {
        const Bytes index = within_16(swapped ^ splat(tree.beginning[g]));
        *e = *e | look_up(table_of(exponents.exponent[g + 1]), index);
        *shift = *shift | look_up(table_of(tree.shift[g + 1]), index);
    }
}

// The bits of each value that go through the lane in near mode.
GZ_INLINE Bytes near_widths(Bytes e, const int8_t* floors, Bytes nonzero) {
    // kept = e - (f + 127), where f + 127 as an unsigned byte is f + 128 - 1: it saturates at 0 by itself.
    const Bytes floor = load(floors), most = splat(23);
    const Bytes exact = equal(floor, splat(kExact)) | equal(e, splat(255));
    const Bytes kept = smaller(subtract_to_zero(e, floor + splat(127)), most);
    return (select(exact, most, kept) + splat(1)) & nonzero;
}

// The phases of a row after its exponents are known, each for all blocks; false if a stream runs dry.
template <int Blocks>
GZ_INLINE bool decode_fields(const LaneOutput* o, Reader* reader, int start, const Bytes* e, Bytes present) {
    Bytes bits;
#pragma GCC unroll 4
    for (int k = 0; k < Blocks; k++) {
        const Bytes count = splat(o[k].rest) & (o[k].pruned ? without(present, equal(e[k], splat(0))) : present);
        if (!reader[k].pop(count, &bits)) return false;
        store(o[k].chunk[0] + start, bits);
    }
    return true;
}
template <int Blocks>
GZ_INLINE bool decode_parts(const LaneOutput* o, Reader* reader, int start, const Bytes* e, Bytes present) {
    Bytes width[Blocks], widest = splat(0), bits;
#pragma GCC unroll 4
    for (int k = 0; k < Blocks; k++) {
        const Bytes nonzero = without(present, equal(e[k], splat(0)));
        if (o[k].coding == kNear) {
            width[k] = near_widths(e[k], o[k].floor + start, nonzero);
        } else {
            if (!reader[k].pop(splat(2) & nonzero, &bits)) return false;
            store(o[k].level + start, bits);
            const Bytes twice = bits + bits;
            width[k] = (splat(24) - (twice + twice + twice)) & nonzero;
        }
        store(o[k].width + start, width[k]);
        widest = larger(widest, width[k]);
    }
#pragma GCC unroll 3
    for (int c = 0; c < 3; c++) {
        const bool here = any(subtract_to_zero(widest, splat(8 * c)));
#pragma GCC unroll 4
        for (int k = 0; k < Blocks; k++) {
            bits = splat(0);
            if (here && !reader[k].pop(smaller(splat(8), subtract_to_zero(width[k], splat(8 * c))), &bits)) return false;
            store(o[k].chunk[c] + start, bits);
        }
    }
    return true;
}

// Decodes Blocks blocks of the same size and code in lockstep, so that they hide each other's latencies.
template <int Blocks, int Groups>
int decode_lanes(const LaneOutput* o, const CodeTree& tree) {
    Reader reader[Blocks];
    ExponentTree exponents[Blocks];
    bool fields_only = o[0].coding == kFixed;
    for (int k = 0; k < Blocks; k++) {
        if (int error = reader[k].start(o[k])) return error;
        exponents[k].make(tree, o[k].base);
        fields_only &= o[k].rest == 0;
    }
    for (int start = 0; start < o[0].n; start += kLanes) {
        const bool whole = o[0].n - start >= kLanes;
        const Bytes present = first_lanes(whole ? kLanes : o[0].n - start);
        o[0].prefetch.lines(start / kLanes);
        Bytes e[Blocks];
#pragma GCC unroll 4
        for (int k = 0; k < Blocks; k++) {
            Reader& r = reader[k];
            Bytes shift;
            look_up_symbols<Groups>(tree, exponents[k], r.s.low, &e[k], &shift);
            const Bytes escaped = equal(shift, splat(0)) & present;
            const bool escapes = any(escaped);
            if (__builtin_expect(escapes, 0)) shift = select(escaped, splat(tree.escape_shift), shift);
            if (__builtin_expect(whole, 1))
                r.s = shift_right(r.s, shift);
            else
                r.s = shift_right_some(r.s, shift & present);
            if (!r.refill()) return GZ_BAD_LANES;
            if (__builtin_expect(escapes, 0)) {
                Bytes raw;
                if (!o[k].escapes || !r.pop(splat(8) & escaped, &raw)) return GZ_BAD_LANES;
                e[k] = select(escaped, raw, e[k]);
            }
            store(o[k].exponent + start, e[k]);
        }
        if (fields_only) continue;
        const bool fixed = o[0].coding == kFixed;
        if (!(fixed ? decode_fields<Blocks>(o, reader, start, e, present) : decode_parts<Blocks>(o, reader, start, e, present)))
            return GZ_BAD_LANES;
    }
    for (int k = 0; k < Blocks; k++)
        if (!reader[k].done()) return GZ_BAD_LANES;
    return 0;
}

template <int Blocks>
int decode_lanes(const LaneOutput* o, const CodeTree& tree) {
    switch (tree.groups) {
        case 0: return decode_lanes<Blocks, 0>(o, tree);
        case 1: return decode_lanes<Blocks, 1>(o, tree);
        case 2: return decode_lanes<Blocks, 2>(o, tree);
        case 4: return decode_lanes<Blocks, 4>(o, tree);
        case 8: return decode_lanes<Blocks, 8>(o, tree);
        default: return decode_lanes<Blocks, 16>(o, tree);
    }
}

// Blocks of one code.
inline int decode_dense_lanes(const LaneOutput* lanes, int count) {
    if (!count) return 0;
    const CodeTree tree(*lanes[0].table);
    bool alike = tree.fits;
    for (int i = 0; i < count; i++) alike &= lanes[i].n == lanes[0].n && !lanes[i].single;
    if (alike && count == 4) return decode_lanes<4>(lanes, tree);
    for (int i = 0; i < count;) {
        const bool pair = alike && i + 2 <= count;
        const bool plainly = !tree.fits || lanes[i].single;
        if (int error = pair      ? decode_lanes<2>(lanes + i, tree)
                        : plainly ? plain::decode_lanes(lanes[i])
                                  : decode_lanes<1>(lanes + i, tree))
            return error;
        i += pair ? 2 : 1;
    }
    return 0;
}
