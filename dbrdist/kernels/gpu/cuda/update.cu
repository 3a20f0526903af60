// Updates of flat memory: p and g of type T, state of the type A in which sums over T run.

template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

// Numbers come as arguments; in a captured step from `declared`, which is written before each replay. Nothing is done
// where `skip` is set, because gradients hold NaN or infinity.
#define TAKE(k, number) if (declared) number = declared[k]

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

template <typename T>
__global__ void sgd(T* p, const T* g, long long size, double lr, const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    typedef typename Wide<T>::type A;
    EACH(i, size) p[i] = T(static_cast<A>(p[i]) - static_cast<A>(g[i]) * A(lr));
}

template <typename T, typename A>
__global__ void momentum_sgd(T* p, const T* g, A* v, long long size, double lr, double momentum,
                             const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, momentum);
    EACH(i, size) {
        A moved = A(momentum) * v[i] - static_cast<A>(g[i]) * A(lr);
        v[i] = moved;
        p[i] = T(static_cast<A>(p[i]) + moved);
    }
}

template <typename T, typename A>
__global__ void nesterov_ag(T* p, const T* g, A* v, long long size, double lr, double momentum,
                            const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, momentum);
    EACH(i, size) {
        A step = static_cast<A>(g[i]) * A(lr), moved = A(momentum) * v[i] - step;
        v[i] = moved;
        p[i] = T((static_cast<A>(p[i]) - step) + moved * A(momentum));
    }
}

template <typename T, typename A>
__global__ void corrected_momentum_sgd(T* p, const T* g, A* v, long long size, double lr, double momentum,
                                       const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, momentum);
    EACH(i, size) {
        A moved = A(momentum) * v[i] - static_cast<A>(g[i]);
        v[i] = moved;
        p[i] = T(static_cast<A>(p[i]) + moved * A(lr));
    }
}

// step lr / (root of a mean of squares + eps), where that is not 0
template <typename A>
__device__ A scaled(A step, A square, double lr, double eps) {
    A root = sqrt(square) + A(eps);
    return step / (root == 0 ? A(1) : root) * A(lr);
}

template <typename T, typename A>
__global__ void ada_grad(T* p, const T* g, A* h, long long size, double lr, double eps,
                         const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, eps);
    EACH(i, size) {
        A gradient = static_cast<A>(g[i]);
        A squares = h[i] + gradient * gradient;
        h[i] = squares;
        p[i] = T(static_cast<A>(p[i]) - scaled(gradient, squares, lr, eps));
    }
}

template <typename T, typename A>
__global__ void rmsprop(T* p, const T* g, A* ms, long long size, double lr, double alpha, double rest, double eps,
                        const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, alpha);
    TAKE(2, rest);
    TAKE(3, eps);
    EACH(i, size) {
        A gradient = static_cast<A>(g[i]);
        A mean = A(alpha) * ms[i] + A(rest) * (gradient * gradient);
        ms[i] = mean;
        p[i] = T(static_cast<A>(p[i]) - scaled(gradient, mean, lr, eps));
    }
}

// largest: of v so far, or null; kept: the factor of p for its decay; alpha: with the correction of both biases
template <typename T, typename A>
__global__ void adam(T* p, const T* g, A* m, A* v, A* largest, long long size, double beta1, double rest1, double beta2,
                     double rest2, double alpha, double eps, double kept, const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, beta1);
    TAKE(1, rest1);
    TAKE(2, beta2);
    TAKE(3, rest2);
    TAKE(4, alpha);
    TAKE(5, eps);
    TAKE(6, kept);
    EACH(i, size) {
        A gradient = static_cast<A>(g[i]);
        A first = A(beta1) * m[i] + A(rest1) * gradient;
        A second = A(beta2) * v[i] + A(rest2) * (gradient * gradient);
        m[i] = first;
        v[i] = second;
        if (largest) {
            second = fmax(second, largest[i]);
            largest[i] = second;
        }
        A root = sqrt(second) + A(eps);
        if (root == 0) root = 1;
        p[i] = T(static_cast<A>(p[i]) * A(kept) - A(alpha) * (first / root));
    }
}

// ---- LARS: a layer is cut into pieces, a block for each. of_piece: its layer, first and last + 1 element; of_layer:
// its first and last + 1 piece, and whether it is scaled.

template <typename A>
__device__ A sum_of_block(A value) {
    __shared__ A parts[32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    A total = 0;
    for (int k = 0; k < blockDim.x / 32; ++k) total += parts[k];
    return total;
}

template <typename T, typename A>
__global__ void lars_norms(const T* p, const T* g, A* squares, const long long* of_piece) {
    const long long* piece = of_piece + 3 * blockIdx.x;
    A of_p = 0, of_g = 0;
    for (long long i = piece[1] + threadIdx.x; i < piece[2]; i += blockDim.x) {
        A a = static_cast<A>(p[i]), b = static_cast<A>(g[i]);
        of_p += a * a;
        of_g += b * b;
    }
    of_p = sum_of_block(of_p);
    of_g = sum_of_block(of_g);
    if (threadIdx.x) return;
    squares[2 * blockIdx.x] = of_p;
    squares[2 * blockIdx.x + 1] = of_g;
}

template <typename T, typename A>
__global__ void lars(T* p, const T* g, A* v, const A* squares, const long long* of_piece, const long long* of_layer,
                     double lr, double momentum, double decay, double trust, double eps,
                     const double* declared, const bool* skip) {
    if (skip && *skip) return;
    TAKE(0, lr);
    TAKE(1, momentum);
    TAKE(2, decay);
    TAKE(3, trust);
    TAKE(4, eps);
    const long long* piece = of_piece + 3 * blockIdx.x;
    const long long* layer = of_layer + 3 * piece[0];
    A rate = A(lr), wd = 0;
    if (layer[2]) {
        A of_p = 0, of_g = 0;
        for (long long k = layer[0] + threadIdx.x; k < layer[1]; k += blockDim.x) {
            of_p += squares[2 * k];
            of_g += squares[2 * k + 1];
        }
        of_p = sqrt(sum_of_block(of_p));
        of_g = sqrt(sum_of_block(of_g));
        wd = A(decay);
        if (of_p > 0 && of_g > 0) rate *= A(trust) * of_p / (of_g + wd * of_p + A(eps));
    }
    for (long long i = piece[1] + threadIdx.x; i < piece[2]; i += blockDim.x) {
        A moved = A(momentum) * v[i] - rate * (static_cast<A>(g[i]) + wd * static_cast<A>(p[i]));
        v[i] = moved;
        p[i] = T(static_cast<A>(p[i]) + moved);
    }
}
