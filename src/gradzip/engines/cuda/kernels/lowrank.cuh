// PowerSGD's arithmetic for all matrices of a model at once: codecs/lowrank.py says what it gives, and does the same with
// torch's operations. A table has a row for each matrix, and each kernel a list of tiles: its groups of threads take one
// tile each. Who adds what, and in which order, follows from shapes alone, so that all ranks and all runs get the same bits.
//
// R is the rank, rounded up to 4, 8, 16 or 32: what is beyond the rank is zero. Factors lie row by row, as torch has them.

struct Matrix {
    u64 gradient;   // float[rows][columns], at the end the mean
    u64 before;     // what was lost of it before; 0: nothing
    u64 after;      // room for what is lost now, where the sum with `before` is kept until then; 0: not wanted
    u64 start;      // float[columns][rank]: the last right factor
    u64 fresh;      // the same, for columns of `start` that are zero
    u64 left;       // where its left factor begins among those of all matrices: in values,
    u64 right;      // likewise,
    u64 parts;      // and the sums that its right factor is made of, [chunks][columns][rank]
    int rows, columns;
    int aligned;    // whether four values of a row can be read at once
    int chunk;      // rows in such a sum
    int first_gram, grams;  // its tiles in `gram`
};

// Instead of Args, in the same room: factors.py packs the same fields.
struct LowRank {
    u64 matrices;   // Matrix[]
    u64 tiles;      // uint4[]: matrix, first row, first column; one for each group of threads
    u64 starts;     // float: right factors to start from, columns of length 1
    u64 left;       // float: left factors
    u64 basis;      // float: the same, orthonormal
    u64 parts;      // float
    u64 own;        // float: right factors of this rank; 0: nobody asks for them
    u64 right;      // float: right factors, to be averaged
    u64 grams;      // double[][R * R]
    u64 changes;    // double[2][matrices][R * R]: what makes columns orthonormal, in two turns
    u64 flawed;     // u32: not 0 where a mean is not finite
    u64 matrix_count;
    float scale;    // the loss scale: gradients have it, what is lost is kept without
    int rank;
    int turn;       // 0 or 1
    int padding;
};

constexpr double kShift = 1e-12;   // as in codecs/lowrank.py
constexpr double kLost = 1e-3;
constexpr int kTileColumns = 256;  // of `right` and `mean`
constexpr int kStartThreads = 1024;
constexpr int kLeftRows = 128, kLeftDepth = 32;
constexpr int kGramRows = 512;     // of `gram` and `basis`, so many at a time:
template <int R>
constexpr int kGramStep = R == 32 ? 32 : 64;

DEVICE const LowRank& lowrank_args(const Args& a) { return *(const LowRank*)&a; }
DEVICE bool is_finite(float v) { return (__float_as_uint(v) & 0x7fffffffu) < 0x7f800000u; }

struct Tile {
    const Matrix& m;
    u32 number;  // of the matrix
    int row, column;
};
DEVICE Tile tile_of(const LowRank& a) {
    uint4 t = pointer<const uint4>(a.tiles)[blockIdx.x];
    return {pointer<const Matrix>(a.matrices)[t.x], t.x, (int)t.y, (int)t.z};
}

// V values of a row from column `at` on; zeros behind its end.
template <int V>
DEVICE void load_values(float* v, const float* row, int at, int columns, bool aligned) {
    if (V == 4 && aligned) {
        float4 four = at < columns ? *(const float4*)(row + at) : make_float4(0, 0, 0, 0);
        v[0] = four.x, v[1] = four.y, v[V - 2] = four.z, v[V - 1] = four.w;
    } else if (V == 2 && aligned) {
        float2 two = at < columns ? *(const float2*)(row + at) : make_float2(0, 0);
        v[0] = two.x, v[V - 1] = two.y;
    } else {
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = at + k < columns ? row[at + k] : 0.0f;
    }
}
template <int V>
DEVICE void store_values(float* row, const float* v, int at, int columns, bool aligned) {
    if (V == 4 && aligned) {
        if (at < columns) *(float4*)(row + at) = make_float4(v[0], v[1], v[V - 2], v[V - 1]);
    } else if (V == 2 && aligned) {
        if (at < columns) *(float2*)(row + at) = make_float2(v[0], v[V - 1]);
    } else {
#pragma unroll
        for (int k = 0; k < V; k++)
            if (at + k < columns) row[at + k] = v[k];
    }
}

// The factors to start from: columns scaled to length 1. A group of threads for each matrix.
template <int R>
DEVICE void lowrank_starts(const Args& args) {
    constexpr int kGroups = kStartThreads / R;
    __shared__ double squares[kGroups][R];
    __shared__ float lengths[R];
    const LowRank& a = lowrank_args(args);
    const Matrix& m = pointer<const Matrix>(a.matrices)[blockIdx.x];
    const float *start = pointer<const float>(m.start), *fresh = pointer<const float>(m.fresh);
    float* to = pointer<float>(a.starts) + m.right;
    int j = (int)threadIdx.x % R, group = (int)threadIdx.x / R, rank = a.rank;
    double square = 0;
    if (j < rank)
#pragma unroll 8
        for (int c = group; c < m.columns; c += kGroups) {
            double v = start[(u64)c * rank + j];
            square = fma(v, v, square);
        }
    squares[group][j] = square;
    __syncthreads();
    if (threadIdx.x < R) {
        double all = 0;
        for (int g = 0; g < kGroups; g++) all += squares[g][threadIdx.x];
        lengths[threadIdx.x] = (float)sqrt(all);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *pointer<u32>(a.flawed) = 0;
    __syncthreads();
    if (j < rank)
#pragma unroll 4
        for (int c = group; c < m.columns; c += kGroups) {
            u64 i = (u64)c * rank + j;
            to[i] = lengths[j] == 0 ? fresh[i] : start[i] / lengths[j];
        }
}

// Left factors: P = M Q, where M is the gradient and what was lost before. A tile is kLeftRows rows, with all columns.
template <int R>
DEVICE void lowrank_left(const Args& args) {
    constexpr int kFours = R / 4, kHalves = R == 4 ? 2 : 1;          // threads for a row: of each four, halves of the depth
    constexpr int kRows = kLeftRows * kFours * kHalves / 256;        // rows of a thread
    constexpr int kApart = kLeftRows / kRows, kStride = kLeftDepth + 4;
    __shared__ __align__(16) float rows[kLeftRows][kStride];
    __shared__ __align__(16) float factor[kLeftDepth][R];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    const Matrix& m = t.m;
    const float *gradient = pointer<const float>(m.gradient), *before = pointer<const float>(m.before);
    float* after = pointer<float>(m.after);
    const float* q = pointer<const float>(a.starts) + m.right;
    int columns = m.columns, rank = a.rank, tid = (int)threadIdx.x;
    bool aligned = m.aligned != 0;
    int load_row = tid / 8, load_column = tid % 8 * 4;               // and every 32nd row from there on
    int four = tid % kFours * 4, own_row = tid / kFours % kApart, half = tid / kFours / kApart;
    float sums[kRows][4] = {}, next[4][4], lost[4][4], next_q[kLeftDepth * R / 256 + (kLeftDepth * R % 256 != 0)];
    auto fetch = [&](int at) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = t.row + load_row + 32 * i;
            u64 from = (u64)row * columns;
            int end = row < m.rows ? columns : 0;
            load_values<4>(next[i], gradient + from, at + load_column, end, aligned);
            if (before) load_values<4>(lost[i], before + from, at + load_column, end, aligned);
        }
#pragma unroll
        for (int i = 0; i < (int)(sizeof next_q / 4); i++) {
            int place = tid + 256 * i, c = at + place / R, j = place % R;
            next_q[i] = place < kLeftDepth * R && c < columns && j < rank ? q[(u64)c * rank + j] : 0.0f;
        }
    };
    fetch(0);
    for (int at = 0; at < columns; at += kLeftDepth) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = load_row + 32 * i;
            if (before)
#pragma unroll
                for (int k = 0; k < 4; k++) next[i][k] = __fadd_rn(next[i][k], __fmul_rn(a.scale, lost[i][k]));
            *(float4*)&rows[row][load_column] = make_float4(next[i][0], next[i][1], next[i][2], next[i][3]);
            if (after && t.row + row < m.rows)
                store_values<4>(after + (u64)(t.row + row) * columns, next[i], at + load_column, columns, aligned);
        }
#pragma unroll
        for (int i = 0; i < (int)(sizeof next_q / 4); i++)
            if (tid + 256 * i < kLeftDepth * R) factor[(tid + 256 * i) / R][(tid + 256 * i) % R] = next_q[i];
        __syncthreads();
        if (at + kLeftDepth < columns) fetch(at + kLeftDepth);
        constexpr int kDepth = kLeftDepth / kHalves;
#pragma unroll
        for (int k = 0; k < kDepth; k += 4) {
            float4 x[kRows];
#pragma unroll
            for (int i = 0; i < kRows; i++) x[i] = *(const float4*)&rows[own_row + kApart * i][half * kDepth + k];
#pragma unroll
            for (int d = 0; d < 4; d++) {
                float4 f = *(const float4*)&factor[half * kDepth + k + d][four];
#pragma unroll
                for (int i = 0; i < kRows; i++) {
                    float v = d == 0 ? x[i].x : d == 1 ? x[i].y : d == 2 ? x[i].z : x[i].w;
                    sums[i][0] = fmaf(v, f.x, sums[i][0]);
                    sums[i][1] = fmaf(v, f.y, sums[i][1]);
                    sums[i][2] = fmaf(v, f.z, sums[i][2]);
                    sums[i][3] = fmaf(v, f.w, sums[i][3]);
                }
            }
        }
        __syncthreads();
    }
    if (kHalves == 2) {
        if (half)
            for (int k = 0; k < 4; k++) rows[own_row][four + k] = sums[0][k];
        __syncthreads();
        if (half) return;
        for (int k = 0; k < 4; k++) sums[0][k] += rows[own_row][four + k];
    }
    float* to = pointer<float>(a.left) + m.left;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
        int row = t.row + own_row + kApart * i;
        if (row < m.rows)
            for (int k = 0; k < 4; k++)
                if (four + k < rank) to[(u64)row * rank + four + k] = sums[i][k];
    }
}

// --- Orthonormal columns: Cholesky QR, twice ------------------------------------------------------------------------

// Rows of left factors in double precision, after as many turns as have been made.
template <int R, int Turns>
struct Rows {
    double (*now)[R + 1];

    // For the threads of a group, all of them; `rooms` are for kGramStep<R> rows, `changes` for R.
    DEVICE Rows of(const LowRank& a, const Tile& t, int first, double (*rooms)[kGramStep<R>][R + 1], double (*changes)[R][R]) {
        const float* left = pointer<const float>(a.left) + t.m.left;
        int rank = a.rank;
        if (Turns > 0 && first == t.row) {
            for (int i = (int)threadIdx.x; i < Turns * R * R; i += 256) {
                u64 turn = (u64)(i / (R * R));
                const double* change = pointer<const double>(a.changes) + (turn * a.matrix_count + t.number) * (R * R);
                changes[turn][i / R % R][i % R] = change[i % (R * R)];
            }
        }
        __syncthreads();  // nobody still reads what was there before
        for (int i = (int)threadIdx.x; i < kGramStep<R> * R; i += 256) {
            int row = first + i / R, j = i % R;
            rooms[0][i / R][j] = row < t.m.rows && j < rank ? left[(u64)row * rank + j] : 0.0f;
        }
        __syncthreads();
        constexpr int kOwn = kGramStep<R> * R / 256, kApart = 256 / R;  // rows of a thread, which has one column
        int j = (int)threadIdx.x % R, own = (int)threadIdx.x / R;
        for (int turn = 0; turn < Turns; turn++) {
            double sums[kOwn] = {};
#pragma unroll
            for (int k = 0; k < R; k++) {
                double change = changes[turn][k][j];
#pragma unroll
                for (int i = 0; i < kOwn; i++) sums[i] = fma(rooms[turn % 2][own + kApart * i][k], change, sums[i]);
            }
            for (int i = 0; i < kOwn; i++) rooms[1 - turn % 2][own + kApart * i][j] = sums[i];
            __syncthreads();
        }
        return {rooms[Turns % 2]};
    }
};

// X^T X of a tile of rows.
template <int R, int Turns>
DEVICE void lowrank_gram(const Args& args) {
    constexpr int kEntries = R * R, kGroups = kEntries < 256 ? 256 / kEntries : 1;
    constexpr int kOwn = kEntries < 256 ? 1 : kEntries / 256;
    __shared__ double rooms[Turns ? 2 : 1][kGramStep<R>][R + 1], changes[Turns ? Turns : 1][R][R], halves[kGroups][kEntries];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    int end = t.row + kGramRows < t.m.rows ? t.row + kGramRows : t.m.rows;
    int entry = (int)threadIdx.x % kEntries, group = kEntries < 256 ? (int)threadIdx.x / kEntries : 0;
    double sums[kOwn] = {};
    for (int first = t.row; first < end; first += kGramStep<R>) {
        auto x = Rows<R, Turns>::of(a, t, first, rooms, changes).now;
        for (int row = group; row < kGramStep<R>; row += kGroups)
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
                int place = entry + 256 * i;
                sums[i] = fma(x[row][place / R], x[row][place % R], sums[i]);
            }
    }
    double* to = pointer<double>(a.grams) + (u64)blockIdx.x * kEntries;
    if (kGroups == 1) {
        for (int i = 0; i < kOwn; i++) to[entry + 256 * i] = sums[i];
        return;
    }
    halves[group][entry] = sums[0];
    __syncthreads();
    if (group) return;
    double all = 0;
    for (int g = 0; g < kGroups; g++) all += halves[g][entry];
    to[entry] = all;
}

// What makes the columns orthonormal: from the sums of the tiles, for each matrix by a group of threads.
template <int R>
DEVICE void lowrank_solve(const Args& args) {
    constexpr int kEntries = R * R, kGroups = kEntries < 256 ? 256 / kEntries : 1;
    __shared__ double gram[R][R + 1], inverse[R][R + 1], scale[R], halves[kGroups][kEntries];
    const LowRank& a = lowrank_args(args);
    const Matrix& m = pointer<const Matrix>(a.matrices)[blockIdx.x];
    int tid = (int)threadIdx.x, rank = a.rank, group = kEntries < 256 ? tid / kEntries : 0;
    const double* parts = pointer<const double>(a.grams) + (u64)m.first_gram * kEntries;
    for (int entry = tid % kEntries; entry < kEntries; entry += 256) {
        double all = 0;
#pragma unroll 8
        for (int p = group; p < m.grams; p += kGroups) all += parts[(u64)p * kEntries + entry];
        halves[group][entry] = all;
    }
    __syncthreads();
    for (int entry = tid; entry < kEntries; entry += 256) {
        double all = 0;
        for (int g = 0; g < kGroups; g++) all += halves[g][entry];
        gram[entry / R][entry % R] = all;
        inverse[entry / R][entry % R] = 0;
    }
    __syncthreads();
    double least = a.turn ? kLost * kLost : 0;
    if (tid < rank) {
        double square = gram[tid][tid];
        scale[tid] = square > least ? 1 / sqrt(square) : 0;  // columns of zeros stay so
    }
    __syncthreads();
    for (int entry = tid; entry < kEntries; entry += 256) {
        int i = entry / R, j = entry % R;
        if (i < rank && j < rank) gram[i][j] = gram[i][j] * scale[i] * scale[j] + (i == j ? kShift : 0);
    }
    __syncthreads();
    for (int c = 0; c < rank; c++) {  // the lower triangle becomes the factor, its diagonal the reciprocals
        double pivot = 1 / sqrt(gram[c][c]);
        __syncthreads();
        if (tid == c) gram[c][c] = pivot;
        if (tid > c && tid < rank) gram[tid][c] *= pivot;
        __syncthreads();
        for (int entry = tid; entry < kEntries; entry += 256) {
            int i = entry / R, j = entry % R;
            if (i < rank && j > c && j <= i) gram[i][j] = fma(-gram[i][c], gram[j][c], gram[i][j]);
        }
        __syncthreads();
    }
    if (tid < rank)  // a column of the inverse each
        for (int i = tid; i < rank; i++) {
            double sum = i == tid ? 1 : 0;
            for (int k = tid; k < i; k++) sum = fma(-gram[i][k], inverse[k][tid], sum);
            inverse[i][tid] = sum * gram[i][i];
        }
    __syncthreads();
    double* to = pointer<double>(a.changes) + ((u64)a.turn * a.matrix_count + blockIdx.x) * kEntries;
    for (int entry = tid; entry < kEntries; entry += 256) {
        int i = entry / R, j = entry % R;
        to[entry] = i < rank && j < rank ? scale[i] * inverse[j][i] : 0;
    }
}

// The orthonormal columns.
template <int R>
DEVICE void lowrank_basis(const Args& args) {
    __shared__ double rooms[2][kGramStep<R>][R + 1], changes[2][R][R];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    float* to = pointer<float>(a.basis) + t.m.left;
    int end = t.row + kGramRows < t.m.rows ? t.row + kGramRows : t.m.rows, rank = a.rank;
    for (int first = t.row; first < end; first += kGramStep<R>) {
        auto x = Rows<R, 2>::of(a, t, first, rooms, changes).now;
        for (int i = (int)threadIdx.x; i < kGramStep<R> * R; i += 256) {
            int row = first + i / R, j = i % R;
            if (row < end && j < rank) to[(u64)row * rank + j] = (float)x[i / R][j];
        }
    }
}

// --- Right factors ---------------------------------------------------------------------------------------------------

// Some rows of an orthonormal factor, for all threads of a group.
template <int R, int Threads, int Count>
DEVICE void share_rows(float (*shared)[R], const float* factor, int first, int end, int rank) {
    __syncthreads();
    for (int i = (int)threadIdx.x; i < Count * R; i += Threads) {
        int row = first + i / R, j = i % R;
        shared[i / R][j] = row < end && j < rank ? factor[(u64)row * rank + j] : 0.0f;
    }
    __syncthreads();
}

// How the threads of a group share a tile of kTileColumns columns: each has V columns and, of the rank, one of S parts.
// Where there are two parts, the halves of a warp have the same columns.
template <int V, int S>
struct Share {
    static constexpr int kThreads = kTileColumns / V * S;
    int part, column;
    DEVICE Share of(const Tile& t) {
        int tid = (int)threadIdx.x, group = S == 1 ? tid : tid / 32 * 16 + tid % 16;
        return {S == 1 ? 0 : tid / 16 % 2, t.column + group * V};
    }
};

// M^T P over a chunk of rows.
template <int R, int V, int S>
DEVICE void lowrank_right(const Args& args) {
    constexpr int kThreads = Share<V, S>::kThreads, kStep = 32, kAtOnce = 4, kOwn = R / S;
    __shared__ __align__(16) float shared[kStep][R];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    const Matrix& m = t.m;
    Share<V, S> share = Share<V, S>::of(t);
    const float* values = pointer<const float>(m.after ? m.after : m.gradient);
    const float* factor = pointer<const float>(a.basis) + m.left;
    int columns = m.columns, rank = a.rank, at = share.column, skip = share.part * kOwn;
    int end = t.row + m.chunk < m.rows ? t.row + m.chunk : m.rows;
    bool aligned = m.aligned != 0;
    float sums[V][kOwn] = {};
    for (int first = t.row; first < end; first += kStep) {
        share_rows<R, kThreads, kStep>(shared, factor, first, end, rank);
        for (int row = 0; row < kStep; row += kAtOnce) {
            float x[kAtOnce][V];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++)
                load_values<V>(x[i], values + (u64)(first + row + i) * columns, at, first + row + i < end ? columns : 0, aligned);
#pragma unroll
            for (int i = 0; i < kAtOnce; i++)
#pragma unroll
                for (int j = 0; j < kOwn; j += 4) {
                    float4 f = *(const float4*)&shared[row + i][skip + j];
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        sums[k][j] = fmaf(x[i][k], f.x, sums[k][j]);
                        sums[k][j + 1] = fmaf(x[i][k], f.y, sums[k][j + 1]);
                        sums[k][j + 2] = fmaf(x[i][k], f.z, sums[k][j + 2]);
                        sums[k][j + 3] = fmaf(x[i][k], f.w, sums[k][j + 3]);
                    }
                }
        }
    }
    float* to = pointer<float>(a.parts) + m.parts + (u64)(t.row / m.chunk) * columns * rank;
#pragma unroll
    for (int k = 0; k < V; k++)
#pragma unroll
        for (int j = 0; j < kOwn; j++)
            if (at + k < columns && skip + j < rank) to[(u64)(at + k) * rank + skip + j] = sums[k][j];
}

// The sums over all chunks: a tile is 64 values of a factor, counted as columns.
DEVICE void lowrank_total(const Args& args) {
    __shared__ float quarters[4][64];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    u64 size = (u64)t.m.columns * a.rank, place = (u64)t.column + threadIdx.x % 64;
    u32 group = threadIdx.x / 64, chunks = (u32)((t.m.rows + t.m.chunk - 1) / t.m.chunk);
    const float* parts = pointer<const float>(a.parts) + t.m.parts + place;
    float sum = 0;
    if (place < size) {
#pragma unroll 8
        for (u32 c = group; c < chunks; c += 4) sum += parts[c * size];
    }
    quarters[group][threadIdx.x % 64] = sum;
    __syncthreads();
    if (group || place >= size) return;
    sum = (quarters[0][threadIdx.x] + quarters[1][threadIdx.x]) + (quarters[2][threadIdx.x] + quarters[3][threadIdx.x]);
    pointer<float>(a.right)[t.m.right + place] = sum;
    if (a.own) pointer<float>(a.own)[t.m.right + place] = sum;
}

// --- Means, and what is lost -----------------------------------------------------------------------------------------

template <int N>
DEVICE float dot(const float* shared, const float* q) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        float4 f = *(const float4*)(shared + j);
        sum = fmaf(f.x, q[j], sum);
        sum = fmaf(f.y, q[j + 1], sum);
        sum = fmaf(f.z, q[j + 2], sum);
        sum = fmaf(f.w, q[j + 3], sum);
    }
    return sum;
}

// What the other half of the warp has.
DEVICE float from_other_half(float v) { return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(v), 16)); }

// P Q^T into the gradient, of the averaged Q; M - P Q^T, of this rank's own Q, is what it lost. Tiles are those of
// lowrank_right. Of two halves, the first writes means and the second what is lost.
template <int R, int V, int S>
DEVICE void lowrank_mean(const Args& args) {
    constexpr int kThreads = Share<V, S>::kThreads, kStep = 32, kAtOnce = 4, kOwn = R / S;
    __shared__ __align__(16) float shared[kStep][R];
    const LowRank& a = lowrank_args(args);
    Tile t = tile_of(a);
    const Matrix& m = t.m;
    Share<V, S> share = Share<V, S>::of(t);
    const float* factor = pointer<const float>(a.basis) + m.left;
    float *mean = pointer<float>(m.gradient), *after = pointer<float>(m.after);
    int columns = m.columns, rank = a.rank, at = share.column, skip = share.part * kOwn;
    int end = t.row + m.chunk < m.rows ? t.row + m.chunk : m.rows;
    bool aligned = m.aligned != 0, flawed = false, first_half = share.part == 0, second_half = share.part == S - 1;
    float right[V][kOwn], own[V][kOwn];
    const float *all_right = pointer<const float>(a.right) + m.right, *all_own = pointer<const float>(a.own) + m.right;
#pragma unroll
    for (int k = 0; k < V; k++)
#pragma unroll
        for (int j = 0; j < kOwn; j++) {
            bool inside = at + k < columns && skip + j < rank;
            u64 from = (u64)(at + k) * rank + skip + j;
            right[k][j] = inside ? all_right[from] : 0.0f;
            own[k][j] = inside && after ? all_own[from] : 0.0f;
        }
    for (int first = t.row; first < end; first += kStep) {
        share_rows<R, kThreads, kStep>(shared, factor, first, end, rank);
        for (int row = 0; row < kStep && first + row < end; row += kAtOnce) {
            float x[kAtOnce][V];
            if (after && second_half) {
#pragma unroll
                for (int i = 0; i < kAtOnce; i++)
                    load_values<V>(x[i], after + (u64)(first + row + i) * columns, at, first + row + i < end ? columns : 0, aligned);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                int stop = first + row + i < end ? columns : 0;
                u64 from = (u64)(first + row + i) * columns;
                float y[V], z[V];
#pragma unroll
                for (int k = 0; k < V; k++) {
                    y[k] = dot<kOwn>(&shared[row + i][skip], right[k]);
                    z[k] = after ? dot<kOwn>(&shared[row + i][skip], own[k]) : 0.0f;
                    if (S == 2) {
                        float other = from_other_half(first_half ? z[k] : y[k]);
                        y[k] += other;  // of use in the first half...
                        z[k] += other;  // ...and in the second
                    }
                }
                if (first_half) {
#pragma unroll
                    for (int k = 0; k < V; k++) flawed |= !is_finite(y[k]);
                    store_values<V>(mean + from, y, at, stop, aligned);
                }
                if (after && second_half) {
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        z[k] = __fsub_rn(x[i][k], z[k]);
                        if (a.scale != 1) z[k] = z[k] / a.scale;
                    }
                    store_values<V>(after + from, z, at, stop, aligned);
                }
            }
        }
    }
    if (flawed) *pointer<u32>(a.flawed) = 1;
}
