// cuBLASLt for host memory, by definition and as strict as the real one: the functions that kernels/gpu/cublaslt.py
// calls, with the argument lists of cublasLt.h.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

typedef int status;
enum { SUCCESS = 0, INVALID = 7, UNSUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };

struct Desc {
    int compute, scale;
    int32_t transa = 0, transb = 0, epilogue = 1, bias_type = -1;
    uint64_t bias = 0;
};
struct Layout { int type; uint64_t rows, cols; int64_t ld; int32_t batch = 1; int64_t stride = 0; };
// alignments: of A, B, C and D, which algorithms may rely on
struct Preference { uint64_t workspace = 0; uint32_t alignments[4] = {256, 256, 256, 256}; };
struct Heuristic { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; };
static const uint64_t MARK = 0x6c74;
static long made = 0;

static double get(int type, const void* p, int64_t i) {
    if (type == R_32F) return static_cast<const float*>(p)[i];
    if (type == R_64F) return static_cast<const double*>(p)[i];
    if (type == R_16F) return double(static_cast<const _Float16*>(p)[i]);
    uint32_t bits = uint32_t(static_cast<const uint16_t*>(p)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static void put(int type, void* p, int64_t i, double v) {
    if (type == R_32F) { static_cast<float*>(p)[i] = float(v); return; }
    if (type == R_64F) { static_cast<double*>(p)[i] = v; return; }
    if (type == R_16F) { static_cast<_Float16*>(p)[i] = _Float16(float(v)); return; }
    float value = float(v);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits += 0x7fff + ((bits >> 16) & 1);
    static_cast<uint16_t*>(p)[i] = uint16_t(bits >> 16);
}

static bool fits(const Layout* l) {
    return l->ld >= int64_t(l->rows) && l->rows && l->cols;
}

static status check(const Desc* d, const Layout* a, const Layout* b, const Layout* c, const Layout* y) {
    if (!d || !a || !b || !c || !y || !fits(a) || !fits(b) || !fits(c) || !fits(y)) return INVALID;
    const bool wide = a->type == R_64F;
    if (d->compute != (wide ? 70 : 68) || d->scale != (wide ? R_64F : R_32F)) return UNSUPPORTED;
    if (a->type != b->type || c->type != y->type) return UNSUPPORTED;
    const bool narrow = a->type == R_16F || a->type == R_16BF;
    if (y->type != a->type && !(narrow && y->type == R_32F)) return UNSUPPORTED;
    if (d->epilogue != 1 && (d->epilogue != 512 || d->bias_type != R_32F || y->batch != 1)) return UNSUPPORTED;
    const uint64_t m = d->transa ? a->cols : a->rows, k = d->transa ? a->rows : a->cols;
    const uint64_t k2 = d->transb ? b->cols : b->rows, n = d->transb ? b->rows : b->cols;
    if (k != k2 || y->rows != m || y->cols != n || c->rows != m || c->cols != n) return INVALID;
    if (a->batch != y->batch || b->batch != y->batch || c->batch != y->batch) return INVALID;
    return SUCCESS;
}

extern "C" {

status cublasLtCreate(void** handle) { *handle = reinterpret_cast<void*>(MARK); return SUCCESS; }

status cublasLtMatmulDescCreate(Desc** d, int compute, int scale) {
    *d = new Desc{compute, scale};
    return SUCCESS;
}

status cublasLtMatmulDescSetAttribute(Desc* d, int attribute, const void* value, size_t size) {
    if (attribute == 8) {
        if (size != 8) return INVALID;
        std::memcpy(&d->bias, value, 8);
        return SUCCESS;
    }
    if (size != 4) return INVALID;
    int32_t v;
    std::memcpy(&v, value, 4);
    if (attribute == 7) { d->epilogue = v; return SUCCESS; }
    if (attribute == 26) { d->bias_type = v; return SUCCESS; }
    if (v != 0 && v != 1) return INVALID;
    if (attribute == 3) d->transa = v;
    else if (attribute == 4) d->transb = v;
    else return INVALID;
    return SUCCESS;
}

status cublasLtMatrixLayoutCreate(Layout** l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *l = new Layout{type, rows, cols, ld};
    return fits(*l) ? SUCCESS : INVALID;
}

status cublasLtMatrixLayoutSetAttribute(Layout* l, int attribute, const void* value, size_t size) {
    if (attribute == 5 && size == 4) std::memcpy(&l->batch, value, 4);
    else if (attribute == 6 && size == 8) std::memcpy(&l->stride, value, 8);
    else return INVALID;
    return SUCCESS;
}

status cublasLtMatmulPreferenceCreate(Preference** p) { *p = new Preference; return SUCCESS; }

status cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value, size_t size) {
    if (attribute == 1 && size == 8) std::memcpy(&p->workspace, value, 8);
    else if (attribute >= 5 && attribute <= 8 && size == 4) std::memcpy(&p->alignments[attribute - 5], value, 4);
    else return INVALID;
    return SUCCESS;
}

status cublasLtMatmulAlgoGetHeuristic(void* handle, Desc* d, Layout* a, Layout* b, Layout* c, Layout* y, Preference* p,
                                      int requested, Heuristic* found, int* count) {
    if (uint64_t(handle) != MARK || requested < 1 || !p) return INVALID;
    const status s = check(d, a, b, c, y);
    *count = s == SUCCESS;
    if (s != SUCCESS) return s;
    ++made;
    std::memset(found, 0, sizeof *found);
    found->algo[0] = MARK;
    for (int i = 0; i < 4; ++i) found->algo[1 + i] = p->alignments[i];
    found->algo[7] = y->rows * 1000 + y->cols;
    found->workspace = p->workspace < 1024 ? p->workspace : 1024;
    return SUCCESS;
}

long num_heuristics() { return made; }

status cublasLtMatmul(void* handle, Desc* d, const void* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                      const void* beta, const void* c, Layout* lc, void* y, Layout* ly, const uint64_t* algo,
                      void* workspace, size_t workspace_bytes, void* stream) {
    if (uint64_t(handle) != MARK || !algo || algo[0] != MARK || algo[7] != ly->rows * 1000 + ly->cols) return INVALID;
    const void* const at[] = {a, b, c, y};
    for (int i = 0; i < 4; ++i) if (!algo[1 + i] || uint64_t(at[i]) % algo[1 + i]) return INVALID;
    if (workspace_bytes && (!workspace || uint64_t(workspace) % 16)) return INVALID;
    const status s = check(d, la, lb, lc, ly);
    if (s != SUCCESS) return s;
    const bool wide = la->type == R_64F;
    const double one = wide ? *static_cast<const double*>(alpha) : *static_cast<const float*>(alpha);
    const double old = wide ? *static_cast<const double*>(beta) : *static_cast<const float*>(beta);
    const uint64_t m = ly->rows, n = ly->cols, k = d->transa ? la->rows : la->cols;
    if (d->epilogue == 512) {  // the sums of b over what is multiplied away, one for each column of the result
        if (!d->bias || d->bias % 4) return INVALID;
        for (uint64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (uint64_t t = 0; t < k; ++t) sum += float(get(lb->type, b, d->transb ? t * lb->ld + j : j * lb->ld + t));
            reinterpret_cast<float*>(d->bias)[j] = sum;
        }
    }
    if (workspace_bytes) std::memset(workspace, 255, workspace_bytes);
    for (int32_t batch = 0; batch < ly->batch; ++batch) {
        for (uint64_t j = 0; j < n; ++j) {
            for (uint64_t i = 0; i < m; ++i) {
                double sum = 0;
                float narrow = 0;
                for (uint64_t t = 0; t < k; ++t) {
                    const double u = get(la->type, a, batch * la->stride + (d->transa ? i * la->ld + t : t * la->ld + i));
                    const double v = get(lb->type, b, batch * lb->stride + (d->transb ? t * lb->ld + j : j * lb->ld + t));
                    if (wide) sum += u * v;
                    else narrow += float(u) * float(v);
                }
                const int64_t at = batch * ly->stride + j * ly->ld + i;
                double value = one * (wide ? sum : narrow);
                if (old != 0) value += old * get(lc->type, c, at);
                put(ly->type, y, at, value);
            }
        }
    }
    return SUCCESS;
}
}
