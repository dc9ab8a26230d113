// One block, in the order of docs/format.md. Included once per instruction set, inside a namespace of that name that
// provides the stages (see stages.h):
//   Split split_values(in, scratch, planes)    maps the values, finds exponents and statistics
//   compress_bytes, expand_bytes               drop and restore the bytes of pruned values
//   encode_lanes, decode_dense_lanes           the lanes of one block, of several blocks
//   join_bytes, join_lanes                     put decoded values together, straight into the output; false: not done
//   copy_out                                   a copy that may bypass the cache
//   make_floors                                the floors of some of a block's values
//   round_near                                 what near mode maps a block to; false: not done
//   encode_near, decode_near                   dense blocks of near mode in one pass, where that can be done

// --- Dense block ---

inline int field_width(const Stats& s, int dtype) {
    FloatLayout layout = float_layout(dtype);
    uint32_t mantissa = s.all_bits & ((1u << (layout.field_bits - 1)) - 1);
    if (mantissa) return layout.field_bits - __builtin_ctz(mantissa);
    return int(s.all_bits >> (8 * layout.item_bytes - 1) & 1);
}

inline int encode_dense(const BlockIn& in, const Split& split, uint8_t* out, Scratch& scratch) {
    const int n = in.n;
    const Stats& s = split.stats;
    int width = 0, fields = int(s.nonzero);
    bool pruned = true;
    LaneInput lanes{n, in.table, s.single, s.base, scratch.exponent, nullptr, 0, scratch.width,
                    {scratch.chunk[0], scratch.chunk[1], scratch.chunk[2]}, {}};
    lanes.prefetch.stream = in.ahead.next;
    uint8_t* at = out + kDenseHead;
    if (in.coding == kFixed) {
        pruned = s.odd_zeros == 0;
        if (!pruned) fields = n;
        width = field_width(s, in.job.dtype);
        const int whole = width / 8, rest = width % 8;
        uint8_t* planes[3];
        for (int j = 0; j < 3; j++) planes[j] = at + j * n;
        // Of full planes the upper ones are kept. Planes are squeezed in place: they never reach beyond their source.
        if (!split.full_planes || rest)
            split_fields(split.values, n, in.job.dtype, width, planes, scratch.chunk[0]);
        else if (whole < 3)
            std::memmove(at, at + (3 - whole) * n, size_t(whole) * size_t(n));
        if (fields != n)
            for (int j = 0; j < whole; j++) compress_bytes(planes[j], scratch.exponent, n, at + j * fields);
        at += whole * fields;
        if (rest) {
            lanes.chunks = 1;
            for (int i = 0; i < n; i++) scratch.width[i] = scratch.exponent[i] || !pruned ? uint8_t(rest) : 0;
        }
    } else {
        lanes.chunks = split.chunks;
        if (lanes.chunks < 0) {
            const uint32_t* q = static_cast<const uint32_t*>(split.values);
            lanes.chunks = in.coding == kNear ? split_lane_part<true>(q, n, in.floor, scratch)
                                              : split_lane_part<false>(q, n, in.floor, scratch);
        }
        if (in.coding == kPaper) lanes.level = scratch.level;
    }
    const LaneEnd end = encode_lanes(lanes, out + 4, at);
    const int size = int(end.refill - out), padding = -size & 3;
    std::memset(end.refill, 0, size_t(padding));
    store32(out, uint32_t(width / 8) | uint32_t(width % 8) << 2 | uint32_t(pruned) << 5 | uint32_t(end.escapes) << 6 |
                     uint32_t(s.single) << 7 | uint32_t(s.base) << 8 | uint32_t(fields) << 16 | uint32_t(padding) << 30);
    return size + padding;
}

// --- Which kind a block gets ---

BlockOut encode_block(const BlockIn& given, uint8_t* out, Scratch& scratch) {
    BlockIn in = given;
    if (in.coding == kNear) {
        BlockOut result;
        if (encode_near(in, out, scratch, &result)) return result;
    }
    if (in.coding != kFixed) {
        make_floors(in.floors, 0, in.n, scratch.floor);
        in.floor = scratch.floor;
    }
    fetch_sample(in.ahead, size_t(float_layout(in.job.dtype).item_bytes));
    Split split = split_values(in, scratch, out + kDenseHead);
    const Stats& s = split.stats;
    if (s.nonzero == 0 && s.odd_zeros == 0) return {kSparse, 0};
    if (in.coding == kNear) {
        SparseValues values;
        const int size = gather_plain(in, split, scratch, values) ? encode_sparse(values, in.n, *in.table, s.base, out) : -1;
        if (size >= 0) return {kSparse, size};
    }
    const int item = float_layout(in.job.dtype).item_bytes, bytes = in.n * item, raw = (bytes + 3) / 4 * 4;
    const int dense = encode_dense(in, split, out, scratch);
    if (dense < raw) return {kDense, dense};
    std::memcpy(out, mapped_values(in, split, scratch), size_t(bytes));
    std::memset(out + bytes, 0, size_t(raw - bytes));
    return {kRaw, raw};
}

// --- What becomes of values ---

inline const void* rounded_values(const BlockIn& in, Scratch& scratch) {
    if (in.job.dtype != GZ_FLOAT32 || in.job.mode == GZ_LOSSLESS) return in.values;
    if (in.coding != kFixed) make_floors(in.floors, 0, in.n, scratch.floor);
    if (in.coding != kNear || !round_near(in.values, in.n, scratch.floor, scratch.mapped))
        map_values(in.values, in.n, in.job, scratch.floor, scratch.mapped);
    return scratch.mapped;
}

void round_block(const BlockIn& in, const Target& target, Scratch& scratch) {
    deliver(rounded_values(in, scratch), in.n, in.job.dtype, target);
}

inline void subtract_floats(const void* GZ_RESTRICT from, const void* GZ_RESTRICT what, int n, void* GZ_RESTRICT to) {
    for (int i = 0; i < n; i++) put_value(to, i, value_at<float>(from, i) - value_at<float>(what, i));
}

inline void divide_floats(void* values, int n, float divisor) {
    int exponent;
    if (std::frexp(divisor, &exponent) == 0.5f && exponent > -100 && exponent < 100) {  // as exact as a division, and faster
        const float factor = 1 / divisor;
        for (int i = 0; i < n; i++) put_value(values, i, value_at<float>(values, i) * factor);
    } else {
        for (int i = 0; i < n; i++) put_value(values, i, value_at<float>(values, i) / divisor);
    }
}

void divide(void* values, uint64_t n, float divisor) {
    for (uint64_t start = 0; start < n; start += kBlock) {
        uint8_t* at = static_cast<uint8_t*>(values) + 4 * start;
        const int here = int(n - start < kBlock ? n - start : kBlock);
        divide_floats(at, here, divisor);
    }
}

void lost_of_block(const BlockIn& in, float scale, void* out, Scratch& scratch) {
    subtract_floats(in.values, rounded_values(in, scratch), in.n, out);
    if (scale != 1) divide_floats(out, in.n, scale);
}

// --- Decoding ---

struct DenseHead {
    int width, base, fields, padding;
    bool pruned, escapes, single;
};

inline int read_dense(const BlockData& b, int n, int dtype, Coding coding, DenseHead* h, LaneOutput* lanes) {
    FloatLayout layout = float_layout(dtype);
    if (b.size < kDenseHead) return GZ_BAD_DENSE;
    uint32_t head = load32(b.data);
    h->width = int(8 * (head & 3) + (head >> 2 & 7));
    h->pruned = head >> 5 & 1;
    h->escapes = head >> 6 & 1;
    h->single = head >> 7 & 1;
    h->base = int(head >> 8 & 255);
    h->fields = int(head >> 16 & 0x3fff);
    h->padding = int(head >> 30);
    int whole = h->width / 8, refill_at = kDenseHead + whole * h->fields, end = b.size - h->padding;
    if (h->width > layout.field_bits || (coding != kFixed && (h->width || !h->pruned))) return GZ_BAD_DENSE;
    if (h->base >> layout.exponent_bits || h->fields > n || (h->single && h->escapes)) return GZ_BAD_DENSE;
    if (refill_at > end) return GZ_BAD_DENSE;
    for (int i = end; i < b.size; i++)
        if (b.data[i]) return GZ_BAD_DENSE;
    lanes->n = n;
    lanes->single = h->single;
    lanes->escapes = h->escapes;
    lanes->pruned = h->pruned;
    lanes->base = h->base;
    lanes->coding = coding;
    lanes->rest = h->width % 8;
    lanes->states = b.data + 4;
    lanes->refill = b.data + refill_at;
    lanes->end = b.data + end;
    return 0;
}

// Checks the decoded exponents of a dense block and delivers its values.
inline int finish_dense(const BlockData& b, const DenseHead& h, int dtype, Coding coding, const Target& target, Scratch& s) {
    const int n = b.n;
    uint32_t nonzero = 0;
    uint8_t all = 0;
    for (int i = 0; i < n; i++) {
        all |= s.exponent[i];
        nonzero += s.exponent[i] != 0;
    }
    if (all >> float_layout(dtype).exponent_bits) return GZ_BAD_DENSE;
    if ((h.pruned ? int(nonzero) : n) != h.fields) return GZ_BAD_FIELDS;
    if (coding != kFixed) {
        if (join_lanes(s, n, target)) return 0;
        join_lane_part(s.exponent, s.chunk[0], s.chunk[1], s.chunk[2], s.width, n, s.mapped);
        deliver(s.mapped, n, dtype, target);
        return 0;
    }
    const uint8_t* planes[3];
    for (int j = 0; j < 3; j++) {
        planes[j] = b.data + kDenseHead + j * h.fields;
        if (h.fields != n && j < h.width / 8) {
            expand_bytes(planes[j], h.fields, s.exponent, n, s.plane[j]);
            planes[j] = s.plane[j];
        }
    }
    if (dtype == GZ_FLOAT32 && h.width % 8 == 0 && join_bytes(s.exponent, planes, n, h.width / 8, target)) return 0;
    if (dtype == GZ_FLOAT32)
        join_fields<uint32_t, 24>(s.exponent, planes, s.chunk[0], n, h.width, s.mapped);
    else if (dtype == GZ_BFLOAT16)
        join_fields<uint16_t, 8>(s.exponent, planes, s.chunk[0], n, h.width, reinterpret_cast<uint16_t*>(s.mapped));
    else
        join_fields<uint16_t, 11>(s.exponent, planes, s.chunk[0], n, h.width, reinterpret_cast<uint16_t*>(s.mapped));
    deliver(s.mapped, n, dtype, target);
    return 0;
}


int decode_group(const BlockData* block, int count, int dtype, Coding coding, const Target* target, const Ahead& ahead,
                 Scratch* scratch) {
    const int item = float_layout(dtype).item_bytes;
    DenseHead head[kGroup];
    LaneOutput lanes[kGroup];
    int dense[kGroup], dense_count = 0;
    uint32_t done = 0;  // a bit for each block
    if (coding == kNear)
        if (int error = decode_near(block, count, target, ahead, &done)) return error;
    for (int k = 0; k < count; k++) {
        if (done >> k & 1) continue;
        const BlockData& b = block[k];
        Scratch& s = scratch[k];
        if (coding == kNear && b.kind != kRaw && b.size) make_floors(b.floors, 0, b.n, s.floor);
        if (b.kind == kDense) {
            LaneOutput& o = lanes[dense_count] = {};
            if (int error = read_dense(b, b.n, dtype, coding, &head[k], &o)) return error;
            o.table = b.table;
            o.floor = s.floor;
            o.exponent = s.exponent;
            o.level = s.level;
            o.width = s.width;
            for (int c = 0; c < 3; c++) o.chunk[c] = s.chunk[c];
            o.prefetch.stream = ahead.next;
            o.prefetch.each = 8;  // a group's bytes over the rows of one block
            dense[dense_count++] = k;
        } else if (b.kind == kRaw) {
            int size = b.n * item;
            if (b.size != (size + 3) / 4 * 4) return GZ_BAD_RAW;
            for (int i = size; i < b.size; i++)
                if (b.data[i]) return GZ_BAD_RAW;
            std::memcpy(s.mapped, b.data, size_t(size));
            deliver(s.mapped, b.n, dtype, target[k]);
        } else if (b.size == 0) {
            if (!target[k].add) {
                std::memset(target[k].out, 0, size_t(b.n) * size_t(item));
                continue;
            }
            std::memset(s.mapped, 0, size_t(b.n) * size_t(item));  // adding +0 is no idle work: it makes +0 of -0
            deliver(s.mapped, b.n, dtype, target[k]);
        } else {
            if (coding != kNear) return GZ_BAD_KIND;
            if (int error = decode_sparse(b.data, b.size, b.n, s.floor, s.mapped)) return error;
            deliver(s.mapped, b.n, dtype, target[k]);
        }
    }
    if (int error = decode_dense_lanes(lanes, dense_count)) return error;
    for (int i = 0; i < dense_count; i++) {
        int k = dense[i];
        if (int error = finish_dense(block[k], head[k], dtype, coding, target[k], scratch[k]))
            return error;
    }
    return 0;
}
