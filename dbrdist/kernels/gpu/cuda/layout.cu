// Copies between layouts, with a cast. Legend: O I filters and their channels, K elements of a window, N C H W images;
// P channels with what is added to make them a multiple of 4 or 8, as tensor cores want them.

template <typename To, typename From>
__device__ To cast(From v) { return To(float(v)); }

// (O, I, K) to (O, K, P)
template <typename From, typename To>
__global__ void to_channels_last(const From* w, To* out, long long size, int I, int K, int P) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        int i = t % P;
        long long rest = t / P;
        int k = rest % K;
        long long o = rest / K;
        out[t] = i < I ? cast<To>(w[(o * I + i) * K + k]) : To(0.0f);
    }
}

// (O, K, P) to (O, I, K)
template <typename From, typename To>
__global__ void to_plain(const From* w, To* out, long long size, int I, int K, int P) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        int k = t % K;
        long long rest = t / K;
        int i = rest % I;
        long long o = rest / I;
        out[t] = cast<To>(w[(o * K + k) * P + i]);
    }
}

// Filters of many layers: where those of each begin among all elements, and their numbers. Arguments of a kernel may take
// 4,096 bytes.
struct Piece {
    const void* source;
    void* target;
    long long first;
    int I, K, P, unused;
};
struct Pieces {
    int count, unused;
    Piece pieces[96];
};

// The piece of an element.
__device__ int piece_of(const Pieces& all, long long t) {
    int low = 0, high = all.count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (all.pieces[middle].first <= t) low = middle; else high = middle - 1;
    }
    return low;
}

// (O, I, K) to (O, K, P), for each piece
template <typename From, typename To>
__global__ void all_to_channels_last(const __grid_constant__ Pieces all, long long size) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        const int n = piece_of(all, t);
        const long long at = t - all.pieces[n].first;
        const int I = all.pieces[n].I, K = all.pieces[n].K, P = all.pieces[n].P;
        const int i = at % P;
        const long long rest = at / P;
        const int k = rest % K;
        const long long o = rest / K;
        const From* source = (const From*)all.pieces[n].source;
        ((To*)all.pieces[n].target)[at] = i < I ? cast<To>(source[(o * I + i) * K + k]) : To(0.0f);
    }
}

// (O, K, P) to (O, I, K), for each piece
template <typename From, typename To>
__global__ void all_to_plain(const __grid_constant__ Pieces all, long long size) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        const int n = piece_of(all, t);
        const long long at = t - all.pieces[n].first;
        const int I = all.pieces[n].I, K = all.pieces[n].K, P = all.pieces[n].P;
        const int k = at % K;
        const long long rest = at / K;
        const int i = rest % I;
        const long long o = rest / I;
        ((To*)all.pieces[n].target)[at] = cast<To>(((const From*)all.pieces[n].source)[(o * K + k) * P + i]);
    }
}

// (N, C, H, W) of any strides to (N, H, W, P)
template <typename From, typename To>
__global__ void widen(const From* x, To* out, long long size, int C, int H, int W, int P, long long sn, long long sc,
                      long long sh, long long sw) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        int c = t % P;
        long long rest = t / P;
        int j = rest % W;
        rest /= W;
        int i = rest % H;
        long long n = rest / H;
        out[t] = c < C ? cast<To>(x[n * sn + c * sc + i * sh + j * sw]) : To(0.0f);
    }
}

// Images (N, H, W, C) of bytes: the entry of each value in the table (256, C) of its channel.
template <typename To>
__global__ void by_table(const unsigned char* x, const To* table, To* out, long long size, int C) {
    for (long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x; t < size; t += (long long)gridDim.x * blockDim.x) {
        out[t] = table[x[t] * C + int(t % C)];
    }
}
