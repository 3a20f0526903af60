// One step of a recurrent layer for the first n of N examples of U units, after the product of the state with its
// weights. h, c: the states (N, U), which become those after the step; before, cells: what they were, for backward.

template <typename T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); i += (long long)gridDim.x * blockDim.x)

template <typename A>
__device__ A sigmoid(A x) { return 1 / (1 + exp(-x)); }

// gates (n, 4 U): in zx + zh the sources of a, i, f, o; then their values.
template <typename T>
__global__ void lstm_forward(const T* zx, const T* zh, T* h, T* c, T* gates, T* before, T* cells, T* y, int n, int U) {
    typedef typename Wide<T>::type A;
    EACH(t, (long long)n * U) {
        const long long first = t / U * 4 * U + t % U;
        A z[4];
        for (int k = 0; k < 4; ++k) z[k] = static_cast<A>(zx[first + k * U]) + static_cast<A>(zh[first + k * U]);
        const A a = tanh(z[0]), i = sigmoid(z[1]), f = sigmoid(z[2]), o = sigmoid(z[3]), was = static_cast<A>(c[t]);
        const A cell = f * was + a * i;
        gates[first] = T(a);
        gates[first + U] = T(i);
        gates[first + 2 * U] = T(f);
        gates[first + 3 * U] = T(o);
        before[t] = h[t];
        cells[t] = c[t];
        c[t] = T(cell);
        h[t] = y[t] = T(o * tanh(cell));
    }
}

// gh, gc: the gradients of the states after the step; gc becomes that of c before it. gz: that of zx and of zh.
template <typename T>
__global__ void lstm_backward(const T* gates, const T* cells, const T* gy, const T* gh, T* gc, T* gz, int n, int U) {
    typedef typename Wide<T>::type A;
    EACH(t, (long long)n * U) {
        const long long first = t / U * 4 * U + t % U;
        const A a = static_cast<A>(gates[first]), i = static_cast<A>(gates[first + U]);
        const A f = static_cast<A>(gates[first + 2 * U]), o = static_cast<A>(gates[first + 3 * U]);
        const A was = static_cast<A>(cells[t]), cell = tanh(f * was + a * i);
        A g = static_cast<A>(gh[t]);
        if (gy) g += static_cast<A>(gy[t]);
        const A of_cell = static_cast<A>(gc[t]) + g * o * (1 - cell * cell);
        gz[first] = T(of_cell * i * (1 - a * a));
        gz[first + U] = T(of_cell * a * i * (1 - i));
        gz[first + 2 * U] = T(of_cell * was * f * (1 - f));
        gz[first + 3 * U] = T(g * cell * o * (1 - o));
        gc[t] = T(of_cell * f);
    }
}

// zx, zh (n, 3 U): the sources of the candidate, r and z, of which zh lacks its bias d; gates (n, 4 U): r, z, the
// candidate, and what r is multiplied with.
template <typename T>
__global__ void gru_forward(const T* zx, const T* zh, const T* d, T* h, T* gates, T* before, T* y, int n, int U) {
    typedef typename Wide<T>::type A;
    EACH(t, (long long)n * U) {
        const int u = t % U;
        const long long at = t / U * 3 * U + u, first = t / U * 4 * U + u;
        A z[3];
        for (int k = 0; k < 3; ++k) z[k] = static_cast<A>(zh[at + k * U]) + static_cast<A>(d[k * U + u]);
        const A r = sigmoid(static_cast<A>(zx[at + U]) + z[1]), keep = sigmoid(static_cast<A>(zx[at + 2 * U]) + z[2]);
        const A fresh = tanh(static_cast<A>(zx[at]) + r * z[0]), was = static_cast<A>(h[t]);
        gates[first] = T(r);
        gates[first + U] = T(keep);
        gates[first + 2 * U] = T(fresh);
        gates[first + 3 * U] = T(z[0]);
        before[t] = h[t];
        h[t] = y[t] = T(fresh + keep * (was - fresh));
    }
}

// gh becomes the part of the gradient of h before the step that does not go through the product.
template <typename T>
__global__ void gru_backward(const T* gates, const T* before, const T* gy, T* gh, T* gzx, T* gzh, int n, int U) {
    typedef typename Wide<T>::type A;
    EACH(t, (long long)n * U) {
        const long long at = t / U * 3 * U + t % U, first = t / U * 4 * U + t % U;
        const A r = static_cast<A>(gates[first]), keep = static_cast<A>(gates[first + U]);
        const A fresh = static_cast<A>(gates[first + 2 * U]), w = static_cast<A>(gates[first + 3 * U]);
        A g = static_cast<A>(gh[t]);
        if (gy) g += static_cast<A>(gy[t]);
        const A of_fresh = g * (1 - keep) * (1 - fresh * fresh);
        gzx[at] = T(of_fresh);
        gzh[at] = T(of_fresh * r);
        gzx[at + U] = gzh[at + U] = T(of_fresh * w * r * (1 - r));
        gzx[at + 2 * U] = gzh[at + 2 * U] = T(g * (static_cast<A>(before[t]) - fresh) * keep * (1 - keep));
        gh[t] = T(g * keep);
    }
}
