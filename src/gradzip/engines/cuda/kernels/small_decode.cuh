// The decoder for small messages: a group of 256 threads decodes BLOCKS blocks. A warp per block pops the rows, a chain of
// steps that wait for each other; so it must not wait for memory as well. All threads make floors before it, and values after it.

// What the rows of a block of coding 0 gave.
struct FixedCells {
    u8 exponent[kBlock];
    u8 rest[kBlock];          // further bits of the fields
    u16 before[kBlock / 32];  // fields in the rows before each
};
// Of codings 1 and 2: floors, which become values.
struct LaneCells {
    u32 cell[kBlock];
};

template <int CODING>
struct CellsOf {
    typedef LaneCells Type;
};
template <>
struct CellsOf<kFixed> {
    typedef FixedCells Type;
};

// What all threads have to do about a block once its rows are popped; kDone: nothing.
constexpr u32 kDone = 3;
struct Waiting {
    u32 kind;
    const u32* block;
    DenseHead head;
};

// Returns the number of fields.
template <class F>
DEVICE u32 stage_fixed(Stream& s, const u32* table, const DenseHead& h, int n, FixedCells& cells, u32& seen) {
    u32 before = 0, lane = lane_id();
#pragma unroll 1
    for (int first = 0; first < n; first += 128) {
        s.advance();
#pragma unroll
        for (int row = first; row < first + 128; row += 32) {
            if (row >= n) break;
            u32 i = (u32)row + lane;
            bool here = i < (u32)n;
            u32 e = (s.template pop_exponent<F>(table, here, seen) >> 23) & 255;
            bool has_field = here && (!h.pruned || e != 0);
            if (h.rest) {
                u32 count = has_field ? h.rest : 0;
                cells.rest[i] = (u8)(s.state & ((1u << count) - 1));
                s.pop(count);
            }
            cells.exponent[i] = (u8)e;
            if (lane == 0) cells.before[row / 32] = (u16)before;
            before += (u32)__popc(__ballot_sync(kAll, has_field));
        }
    }
    return before;
}

// Returns how many values are not 0.
template <int CODING>
DEVICE u32 stage_lanes(Stream& s, const u32* table, int n, LaneCells& cells, u32& seen) {
    u32 fields = 0, lane = lane_id();
    int next = (int)cells.cell[lane];
#pragma unroll 2
    for (int row = 0; row < n; row += 32) {
        u32 i = (u32)row + lane;
        int floor = next;
        next = (int)cells.cell[(i + 32) % kBlock];
        if (row % 64 == 0) s.advance();
        cells.cell[i] = lane_row<CODING>(s, table, i < (u32)n, floor, fields, seen);
    }
    return sum(fields);
}

// Rows are kept for the other threads.
template <class F, int CODING>
struct StagedRows {
    typename CellsOf<CODING>::Type& cells;
    Waiting& waiting;
    int n;

    __device__ __forceinline__ void leave(u32 kind, const u32* block, const DenseHead& h) const {
        if (lane_id() == 0) waiting = {kind, block, h};
    }
    __device__ __forceinline__ u32 dense(Stream& s, const u32* table, const DenseHead& h, u32& seen) const {
        leave(kDense, s.block, h);
        if constexpr (CODING == kFixed) return stage_fixed<F>(s, table, h, n, cells, seen);
        else return stage_lanes<CODING>(s, table, n, cells, seen);
    }
    __device__ __forceinline__ void raw(const u32* block) const { leave(kRaw, block, {}); }
    __device__ __forceinline__ void zeros() const { leave(kSparse, nullptr, {}); }
};

// Puts a block, by all threads; `four_at` gives four neighbours. All that is read is under way before the first is written.
template <class F, bool ADD, class Get>
DEVICE void put_block(const Sink<F, ADD>& sink, int n, const Get& four_at) {
    if (n == kBlock) {
        bool aligned = sink.aligned();
        Four four[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 i = 4 * (threadIdx.x + kSmallThreads * k);
            four[k] = sink.added(i, four_at(i), aligned);
        }
#pragma unroll
        for (u32 k = 0; k < 4; k++) store_four<F>(sink.out, 4 * (threadIdx.x + kSmallThreads * k), four[k], aligned);
        return;
    }
    for (u32 i = 4 * threadIdx.x; i < (u32)n; i += 4 * kSmallThreads) {
        Four four = four_at(i);
        for (u32 k = 0; k < 4 && i + k < (u32)n; k++) sink.put(i + k, four.v[k]);
    }
}

// Of a dense block of coding 0 whose values all have fields of whole bytes.
template <class F>
DEVICE Four plain_four(const Waiting& w, const FixedCells& cells, u32 i) {
    u32 e = ((const u32*)cells.exponent)[i / 4], plane[3], whole = w.head.whole;
#pragma unroll
    for (u32 j = 0; j < 3; j++) plane[j] = j < whole ? w.block[17 + 1024 * j + i / 4] : 0;
    Four four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 field = (plane[0] >> 8 * k & 255) | (plane[1] >> 8 * k & 255) << 8 | (plane[2] >> 8 * k & 255) << 16;
        four.v[k] = join<F>(e >> 8 * k & 255, field << (F::kField - 8 * whole));
    }
    return four;
}

// Of any dense block of coding 0, row by row; values without a field left no gap in the planes.
template <class F, bool ADD>
DEVICE void put_rows(const Waiting& w, const FixedCells& cells, const Sink<F, ADD>& sink, int n) {
    const u8* planes = (const u8*)w.block + 68;
    u32 whole = w.head.whole, rest = w.head.rest, fields = w.head.fields;
#pragma unroll 4
    for (u32 row = warp_id(); row < ((u32)n + 31) / 32; row += kSmallThreads / 32) {
        u32 i = 32 * row + lane_id(), e = cells.exponent[i], kept = rest ? cells.rest[i] : 0;
        bool has_field = i < (u32)n && (!w.head.pruned || e != 0);
        u32 place = cells.before[row] + (u32)__popc(__ballot_sync(kAll, has_field) & lower_lanes());
#pragma unroll
        for (u32 j = 0; j < 3; j++)
            if (has_field && j < whole) kept |= (u32)planes[j * fields + place] << (rest + 8 * j);
        if (i < (u32)n) sink.put(i, join<F>(e, kept << ((u32)F::kField - 8 * whole - rest)));
    }
}

template <class F, int CODING, bool ADD>
DEVICE void put_waiting(const Waiting& w, const typename CellsOf<CODING>::Type& cells, const Sink<F, ADD>& sink, int n) {
    typedef typename F::Bits Bits;
    if (w.kind == kDone) return;
    if (w.kind == kSparse) {
        put_block(sink, n, [](u32) { return Four{{0, 0, 0, 0}}; });
    } else if (w.kind == kRaw) {
        const Bits* raw = (const Bits*)w.block;
        bool together = n == kBlock && can_load_four<F>(raw);
        put_block(sink, n, [=](u32 i) {
            if (together) return load_four<F>(raw, i, true);
            Four four = {{0, 0, 0, 0}};
            for (u32 k = 0; k < 4 && i + k < (u32)n; k++) four.v[k] = raw[i + k];
            return four;
        });
    } else if constexpr (CODING == kFixed) {
        if (n == kBlock && w.head.fields == (u32)kBlock && w.head.rest == 0)
            put_block(sink, n, [&](u32 i) { return plain_four<F>(w, cells, i); });
        else
            put_rows(w, cells, sink, n);
    } else {
        put_block(sink, n, [&](u32 i) { return load_four<Float32>(cells.cell, i, true); });
    }
}

template <class F, int CODING, int FLOOR, bool ADD, int BLOCKS>
DEVICE void small_decode(const Args& a) {
    typedef typename CellsOf<CODING>::Type Cells;
    Cells* cells = (Cells*)dynamic_shared;
    __shared__ CodeRoom room;
    __shared__ Waiting waiting[BLOCKS];
    __shared__ u32 lookup[256], tables[BLOCKS][256];
    __shared__ __align__(kWindow) u32 windows[BLOCKS][kWindow / 4];
    u32 group = blockIdx.x, warp = warp_id();
    const Tensor& t = a.tensor[tensor_of_group(a, group)];
    bool shared_book = t.lengths != 0;
    const u16* index = (const u16*)(pointer<const u8>(t.body) + index_offset(t.numel, shared_book));
    u64 first = (u64)(group - t.first_group) * BLOCKS, block = first + warp, end = blocks_of(t.numel);
    u32 here = end - first < BLOCKS ? (u32)(end - first) : BLOCKS;  // blocks of this group
    // All that is read from memory here is under way at once.
    if (CODING == kNear && warp < here) prefetch_floors<FLOOR>(a, t, block * kBlock, values_in(t, block * kBlock));
    u32 length = stored_length(t, first / kSegmentBlocks), before = 0;
    BodyHead head = read_head(t);
    for (u64 b = threadIdx.x; b < first; b += kSmallThreads) before += index[b] & 0x3fff;
    u32 entry = warp < here ? index[block] : 0, own = 0;
    for (u32 b = 0; b < here; b++) own += b < warp ? index[first + b] & 0x3fff : 0;
    __syncwarp();
    u32 fault = judge_head(a, t, head);
    if (fault) {
        if (first == 0 && threadIdx.x == 0) atomicOr(pointer<u32>(a.status), fault);
        end_ticket(a);
        return;
    }
    room.length[threadIdx.x] = (u8)length;
    if (threadIdx.x < BLOCKS) waiting[threadIdx.x].kind = kDone;
    if constexpr (CODING == kNear) {
        for (u32 b = 0; b < here; b++) {
            Source<Float32, FLOOR> source(a, t, (first + b) * kBlock);
            int n = values_in(t, (first + b) * kBlock);
#pragma unroll 8
            for (u32 i = threadIdx.x; i < (u32)n; i += kSmallThreads) cells[b].cell[i] = (u32)floor_at(source, i);
        }
    }
    __syncthreads();
    Codes c = canonical(room);
    write_lookup(c, lookup);
    u64 at = group_sum(before, room.sums) + own;
    if (!c.complete) {
        fault = kBadTable;
    } else if (warp < here) {
        StagedRows<F, CODING> rows = {cells[warp], waiting[warp], values_in(t, block * kBlock)};
        u32* lists = pointer<u32>(a.slots) + (u64)(group * BLOCKS + warp) * (kSlotBytes / 4);
        fault = decode_block<F, CODING, FLOOR, ADD>(a, t, block, uniform(entry), at, lookup, tables[warp],
                                                    (u8*)windows[warp], lists, rows);
        __syncwarp();
        if (fault && lane_id() == 0) waiting[warp].kind = kDone;
    }
    if (fault && lane_id() == 0) atomicOr(pointer<u32>(a.status), fault);
    __syncthreads();
    for (u32 b = 0; b < here; b++)
        put_waiting<F, CODING, ADD>(waiting[b], cells[b], Sink<F, ADD>(t, (first + b) * kBlock),
                                    values_in(t, (first + b) * kBlock));
    end_ticket(a);
}
