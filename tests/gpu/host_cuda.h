// What the files of kernels/gpu/cuda need of CUDA, for a C++ compiler of the host. What runs their threads is in
// host_cuda.cpp, which is compiled once: hundreds of kernels are, each in a library of its own.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <utility>

using std::isfinite; using std::isinf; using std::max; using std::min;

struct dim3 { unsigned x, y, z; };
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
struct float4 { float x, y, z, w; };

#define __global__
#define __grid_constant__
#define __device__ static inline
#define __forceinline__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct __half {
    _Float16 v;
    __half() = default;
    explicit __half(float f) : v(_Float16(f)) {}
    operator float() const { return float(v); }
};

struct __nv_bfloat16 {
    uint16_t v;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float f) {
        uint32_t bits;
        memcpy(&bits, &f, 4);
        v = std::isnan(f) ? 0x7fff : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
    operator float() const {
        uint32_t bits = uint32_t(v) << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
};

static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
template <typename T> static T __ldcg(const T* p) { return *p; }
static void __threadfence() {}
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }

#if defined(__SANITIZE_ADDRESS__)
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))
#else
#define UNCHECKED
#endif

// ---- of host_cuda.cpp

enum State { READY, AT_WARP, AT_BLOCK, DONE };
extern float* shared_floats;  // memory of a block that a launch gives it
void wait_at(State place);
int run_all(void (*body)(), const unsigned* grid, const unsigned* block, size_t shared);

static void __syncthreads() { wait_at(AT_BLOCK); }
static void __syncwarp(unsigned = ~0u) { wait_at(AT_WARP); }

// A warp is 32 neighbours of one row.
template <typename V>
static V exchange(V v, unsigned at, unsigned from) {
    static V exchanged[1024];
    exchanged[at] = v;
    __syncwarp();
    const V found = exchanged[from];
    __syncwarp();
    return found;
}

static unsigned thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }

template <typename V>
static V __shfl_down_sync(unsigned, V v, int offset) {
    const unsigned at = thread_number();
    return exchange(v, at, at % 32 + offset < 32 ? at + offset : at);
}

template <typename V>
static V __shfl_xor_sync(unsigned, V v, int mask) {
    const unsigned at = thread_number();
    return exchange(v, at, at ^ mask);
}

template <typename V>
static V __shfl_sync(unsigned, V v, int lane) {
    const unsigned at = thread_number();
    return exchange(v, at, at - at % 32 + lane % 32);
}

template <typename... A> struct Call {
    static inline void (*kernel)(A...);
    static inline void** values;
    template <size_t... I>
    UNCHECKED static void with(std::index_sequence<I...>) { kernel(*(A*)values[I]...); }
    UNCHECKED static void body() { with(std::index_sequence_for<A...>()); }
};

// 0, or which argument has another size than the kernel's, -1 for another number of them, -3 where a barrier is not met
// by all threads.
template <typename... A>
UNCHECKED static int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared,
                            void** values, const size_t* sizes, size_t count) {
    const size_t wanted[] = {sizeof(A)...};
    if (count != sizeof...(A)) return -1;
    for (size_t i = 0; i < count; ++i) if (sizes[i] != wanted[i]) return int(i) + 1;
    Call<A...>::kernel = kernel;
    Call<A...>::values = values;
    return run_all(Call<A...>::body, grid, block, shared);
}
