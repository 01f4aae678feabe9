// The operator and its gradient on the CPU, one block at a time, so that a block is read from memory once.
//
// Per block of n tokens: norms and targets (the pass that fetches the block), the weighted Gram matrix, its Cholesky
// factor and the solve, and the weighted sum of the tokens; all but the first pass find the block in the cache. The
// formulas are those of dual.py. Keys are never formed: the Gram matrix is scaled by the norms instead.
//
// No header of torch or Python is used, so this compiles in a second or two. Entry points are at the end.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif

// Norms below EPS count as EPS (F.normalize's rule); rows above LARGE are divided by their largest entry first, so that
// no square overflows.
constexpr double EPS = 1e-12;
constexpr double LARGE = 1e12;
// Blocks up to this many bytes are asked for one block ahead: about a tenth faster at 16 KB, no faster at 36 KB and
// slower at 256 KB, where the next block drives the present one out of the cache.
constexpr int64_t AHEAD = 32768;

template <typename C>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(BYTES), aligned(4), may_alias));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(BYTES), aligned(8), may_alias));
};
template <typename C>
using vec = typename Vector<C>::type;
template <typename C>
constexpr int64_t LANES = BYTES / sizeof(C);

template <typename C>
inline vec<C> load(const C* p) {
  return *reinterpret_cast<const vec<C>*>(p);
}
template <typename C>
inline void store(C* p, vec<C> v) {
  *reinterpret_cast<vec<C>*>(p) = v;
}
// Keeps a value in its register. Compilers would load it again from memory for each of its uses, and loads are what
// limits the Gram matrix.
template <typename V>
inline void hold(V& v) {
#if defined(__AVX__)
  asm("" : "+x"(v));
#endif
}
template <typename C>
inline C sum(vec<C> v) {
  C parts[LANES<C>];
  std::memcpy(parts, &v, BYTES);
#pragma GCC unroll 4
  for (int step = LANES<C> / 2; step > 0; step /= 2)
    for (int i = 0; i < step; i++) parts[i] += parts[i + step];
  return parts[0];
}

struct bf16 {
  uint16_t bits;
};
inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline void narrow(float x, float& y) { y = x; }
inline void narrow(double x, double& y) { y = x; }
inline void narrow(float x, bf16& y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) {
    y.bits = 0x7fc0;
    return;
  }
  y.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

// One call's arguments: shapes, strides in elements, and pointers. C computes, S is how x and the outputs are stored.
struct Problem {
  int64_t blocks, tokens, dim, block_stride, row_stride;
  int64_t normalize_keys, normalize_targets, threads, chunk;
};

template <typename C>
struct Workspace {
  std::vector<const C*> rows;  // the tokens that are there, in order
  std::vector<int64_t> where;  // their places in the block
  std::vector<C> copy;         // rows that had to be converted or divided
  std::vector<C> size;         // what a row was divided by, 1 for almost all
  std::vector<C> square;       // ||row||^2
  std::vector<C> key, target;  // a key is key * row, a target is target * a . row
  std::vector<C> gram, dot, v, alpha, u, beta, gamma, delta;
  Workspace(int64_t tokens, int64_t dim, bool copies)
      : copy(copies ? tokens * dim : 0), size(tokens), square(tokens), key(tokens), target(tokens),
        gram(tokens * tokens), dot(tokens), v(tokens), alpha(tokens), u(tokens), beta(tokens), gamma(tokens),
        delta(tokens) {
    rows.reserve(tokens);
    where.reserve(tokens);
  }
};

// The block's tokens as rows of C: in place where they are stored so, else converted. Leaves masked tokens out.
template <typename C, typename S>
void gather(const Problem& P, const S* block, const uint8_t* mask, Workspace<C>& W) {
  W.rows.clear();
  W.where.clear();
  for (int64_t t = 0; t < P.tokens; t++) {
    if (mask && !mask[t]) continue;
    const S* row = block + t * P.row_stride;
    if constexpr (std::is_same_v<C, S>) {
      W.rows.push_back(row);
    } else {
      C* copy = W.copy.data() + t * P.dim;
      for (int64_t c = 0; c < P.dim; c++) copy[c] = widen(row[c]);
      W.rows.push_back(copy);
    }
    W.where.push_back(t);
  }
}

// ||x||^2 and y.x in one pass over x.
template <typename C>
inline void square_and_dot(const C* x, const C* y, int64_t dim, C& square, C& dot) {
  constexpr int64_t L = LANES<C>;
  vec<C> s0 = {}, s1 = {}, s2 = {}, s3 = {}, d0 = {}, d1 = {}, d2 = {}, d3 = {};
  int64_t c = 0;
  for (; c + 4 * L <= dim; c += 4 * L) {
    vec<C> x0 = load(x + c), x1 = load(x + c + L), x2 = load(x + c + 2 * L), x3 = load(x + c + 3 * L);
    s0 += x0 * x0, s1 += x1 * x1, s2 += x2 * x2, s3 += x3 * x3;
    d0 += x0 * load(y + c), d1 += x1 * load(y + c + L), d2 += x2 * load(y + c + 2 * L), d3 += x3 * load(y + c + 3 * L);
  }
  square = sum<C>((s0 + s1) + (s2 + s3));
  dot = sum<C>((d0 + d1) + (d2 + d3));
  for (; c < dim; c++) square += x[c] * x[c], dot += x[c] * y[c];
}

// Norms of the rows and their products with y. Rows that are too large are replaced by row / size, with size the
// largest entry. False where a token is not finite, or is too large and its key is not to be normalised.
template <typename C>
bool norms_and_dots(const Problem& P, const C* y, Workspace<C>& W) {
  for (size_t i = 0; i < W.rows.size(); i++) {
    square_and_dot(W.rows[i], y, P.dim, W.square[i], W.dot[i]);
    W.size[i] = 1;
    if (!(W.square[i] <= C(LARGE * LARGE))) {
      if (!P.normalize_keys) return false;
      C largest = 0;
      for (int64_t c = 0; c < P.dim; c++) {
        C entry = std::abs(W.rows[i][c]);
        if (!(entry <= std::numeric_limits<C>::max())) return false;
        largest = entry > largest ? entry : largest;
      }
      if (W.copy.empty()) W.copy.resize(P.tokens * P.dim);
      C* copy = W.copy.data() + W.where[i] * P.dim;
      for (int64_t c = 0; c < P.dim; c++) copy[c] = W.rows[i][c] / largest;
      W.rows[i] = copy;
      W.size[i] = largest;
      square_and_dot(copy, y, P.dim, W.square[i], W.dot[i]);
    }
    C norm = std::sqrt(W.square[i]);
    C inverse = 1 / (norm > C(EPS) ? norm : C(EPS));
    W.key[i] = P.normalize_keys ? inverse : C(1);
    W.target[i] = P.normalize_targets ? inverse : W.size[i];
  }
  return true;
}

// M x N entries of X diag(w) X', accumulated along the rows: the twelve sums of a 3 x 4 tile stay in registers.
template <typename C, int M, int N>
void tile(const C* const* x, const C* const* y, const C* w, int64_t dim, C* out, int64_t stride) {
  constexpr int64_t L = LANES<C>;
  vec<C> sums[M][N] = {};
  int64_t c = 0;
  for (; c + L <= dim; c += L) {
    vec<C> weights = load(w + c), left[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) left[m] = load(x[m] + c) * weights;
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      vec<C> right = load(y[n] + c);
      hold(right);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) sums[m][n] += left[m] * right;
    }
  }
  for (int m = 0; m < M; m++) {
    for (int n = 0; n < N; n++) {
      C total = sum<C>(sums[m][n]);
      for (int64_t r = c; r < dim; r++) total += x[m][r] * w[r] * y[n][r];
      out[m * stride + n] = total;
    }
  }
}

template <typename C, int M>
void tile_columns(int64_t n, const C* const* x, const C* const* y, const C* w, int64_t dim, C* out, int64_t stride) {
  switch (n) {
    case 1: return tile<C, M, 1>(x, y, w, dim, out, stride);
    case 2: return tile<C, M, 2>(x, y, w, dim, out, stride);
    case 3: return tile<C, M, 3>(x, y, w, dim, out, stride);
    default: return tile<C, M, 4>(x, y, w, dim, out, stride);
  }
}

// The upper half of X diag(w) X'. Entries below the diagonal are left undefined.
template <typename C>
void weighted_gram(const Workspace<C>& W, const C* w, int64_t dim, C* gram) {
  int64_t n = W.rows.size();
  const C* const* rows = W.rows.data();
  for (int64_t i = 0; i < n; i += 3) {
    for (int64_t j = i; j < n; j += 4) {
      int64_t columns = n - j < 4 ? n - j : 4;
      C* out = gram + i * n + j;
      switch (n - i) {
        case 1: tile_columns<C, 1>(columns, rows + i, rows + j, w, dim, out, n); break;
        case 2: tile_columns<C, 2>(columns, rows + i, rows + j, w, dim, out, n); break;
        default: tile_columns<C, 3>(columns, rows + i, rows + j, w, dim, out, n);
      }
    }
  }
}

// A = U'U in place, upper half, row by row. A = I + G with G positive semidefinite, and so is S - I for what is left, S,
// after any number of rows. So S_kk >= 1 and S_kj^2 <= (S_kk - 1) (S_jj - 1); where these do not hold it is rounding, and
// they are made to hold. Then no entry can grow, and nothing can fail.
template <typename C>
void factorize(C* A, int64_t n, C* diagonal) {
  for (int64_t k = 0; k < n; k++) diagonal[k] = A[k * n + k];
  for (int64_t k = 0; k < n; k++) {
    C* row = A + k * n;
    C square = diagonal[k] >= 1 ? diagonal[k] : C(1);
    C scale = 1 / std::sqrt(square);
    row[k] = square * scale;
    for (int64_t j = k + 1; j < n; j++) {
      C room = (square - 1) * (diagonal[j] - 1);
      C bound = std::sqrt(room > 0 ? room : C(0));
      C entry = row[j] > bound ? bound : row[j];
      entry = (entry < -bound ? -bound : entry) * scale;
      row[j] = entry;
      diagonal[j] -= entry * entry;
    }
    for (int64_t i = k + 1; i < n; i++) {
      C factor = row[i];
      C* target = A + i * n;
      for (int64_t j = i; j < n; j++) target[j] -= factor * row[j];
    }
  }
}

// x = (U'U)^-1 b; x may be b.
template <typename C>
void solve(const C* U, int64_t n, const C* b, C* x) {
  for (int64_t k = 0; k < n; k++) x[k] = b[k];
  for (int64_t k = 0; k < n; k++) {
    const C* row = U + k * n;
    C y = x[k] / row[k];
    x[k] = y;
    for (int64_t j = k + 1; j < n; j++) x[j] -= y * row[j];
  }
  for (int64_t k = n - 1; k >= 0; k--) {
    const C* row = U + k * n;
    C y = x[k];
    for (int64_t j = k + 1; j < n; j++) y -= row[j] * x[j];
    x[k] = y / row[k];
  }
}

// Asks for the next block's lines at these columns while this one is worked on.
template <typename S>
inline void prefetch(const Problem& P, const S* block, int64_t column) {
  for (int64_t t = 0; t < P.tokens; t++) __builtin_prefetch(block + t * P.row_stride + column);
}

// out = w * sum_i beta_i x_i.
template <typename C, typename S>
void combine(const Problem& P, const Workspace<C>& W, const C* w, const S* next, S* out) {
  constexpr int64_t L = LANES<C>;
  constexpr int64_t LINE = 64 / sizeof(S);
  int64_t n = W.rows.size(), c = 0;
  for (; c + 4 * L <= P.dim; c += 4 * L) {
    if (next)
      for (int64_t line = c; line < c + 4 * L; line += LINE) prefetch(P, next, line);
    vec<C> s0 = {}, s1 = {}, s2 = {}, s3 = {};
    for (int64_t i = 0; i < n; i++) {
      const C* x = W.rows[i] + c;
      C beta = W.beta[i];
      s0 += beta * load(x), s1 += beta * load(x + L), s2 += beta * load(x + 2 * L), s3 += beta * load(x + 3 * L);
    }
    C h[4 * L];
    store(h, s0 * load(w + c));
    store(h + L, s1 * load(w + c + L));
    store(h + 2 * L, s2 * load(w + c + 2 * L));
    store(h + 3 * L, s3 * load(w + c + 3 * L));
    for (int64_t l = 0; l < 4 * L; l++) narrow(h[l], out[c + l]);
  }
  for (; c < P.dim; c++) {
    C s = 0;
    for (int64_t i = 0; i < n; i++) s += W.beta[i] * W.rows[i][c];
    narrow(s * w[c], out[c]);
  }
}

// Per-token values back to the tokens' places; zeros where there is no token.
template <typename C>
void scatter(const Problem& P, const Workspace<C>& W, const C* values, C* out) {
  for (int64_t t = 0; t < P.tokens; t++) out[t] = 0;
  for (size_t i = 0; i < W.rows.size(); i++) out[W.where[i]] = values[i];
}

// NaN everywhere: what a block with an unfit token gives where the caller does not want to hear of it.
template <typename T>
void spoil(T* values, int64_t count) {
  for (int64_t i = 0; i < count; i++) narrow(std::numeric_limits<decltype(widen(*values))>::quiet_NaN(), values[i]);
}

template <typename C, typename S>
int64_t forward(const Problem& P, const S* x, const C* a, const C* w, const C* targets, const uint8_t* mask, S* out,
                C* saved_v, C* saved_alpha, C* saved_factor) {
  int64_t bad = P.blocks;
  bool ahead = P.tokens * P.dim * int64_t(sizeof(S)) <= AHEAD;
#pragma omp parallel num_threads(P.threads) reduction(min : bad)
  {
    Workspace<C> W(P.tokens, P.dim, !std::is_same_v<C, S>);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < P.blocks; b++) {
      const S* block = x + b * P.block_stride;
      gather<C, S>(P, block, mask ? mask + b * P.tokens : nullptr, W);
      if (!norms_and_dots(P, a, W)) {
        bad = b < bad ? b : bad;
        spoil(out + b * P.dim, P.dim);
        if (saved_factor) {
          spoil(saved_v + b * P.tokens, P.tokens);
          spoil(saved_alpha + b * P.tokens, P.tokens);
          spoil(saved_factor + b * P.tokens * P.tokens, P.tokens * P.tokens);
        }
        continue;
      }
      int64_t n = W.rows.size();
      C* A = saved_factor ? saved_factor + b * P.tokens * P.tokens : W.gram.data();
      weighted_gram(W, w, P.dim, A);
      for (int64_t i = 0; i < n; i++) {
        for (int64_t j = i; j < n; j++) A[i * n + j] *= W.key[i] * W.key[j];
        A[i * n + i] += 1;
        W.v[i] = targets ? targets[b * P.tokens + W.where[i]] : W.target[i] * W.dot[i];
      }
      factorize(A, n, W.u.data());
      solve(A, n, W.v.data(), W.alpha.data());
      for (int64_t i = 0; i < n; i++) W.beta[i] = W.key[i] * W.alpha[i];
      if (saved_factor) {
        scatter(P, W, W.v.data(), saved_v + b * P.tokens);
        scatter(P, W, W.alpha.data(), saved_alpha + b * P.tokens);
      }
      combine<C, S>(P, W, w, ahead && b + 1 < P.blocks ? block + P.block_stride : nullptr, out + b * P.dim);
    }
  }
  return bad;
}

// One token's gradient is dx = by_e e + by_h h + by_x x + by_a a.
template <typename C>
struct Coefficients {
  C by_e, by_h, by_x, by_a;
};

template <typename C>
Coefficients<C> coefficients(const Problem& P, const Workspace<C>& W, int64_t i, bool own_targets) {
  C u = W.u[i], alpha = W.alpha[i], v = W.v[i], size = W.size[i];
  Coefficients<C> by = {W.key[i] * alpha / size, -W.key[i] * u / size, 0, 0};
  if (own_targets) by.by_a = u * W.target[i] / size;
  if (W.square[i] > C(EPS * EPS)) {  // a norm below EPS is a constant
    C along = 0;
    if (P.normalize_keys) along += u * (2 * alpha - v);  // the key's gradient has no part along the key
    if (P.normalize_targets && own_targets) along += u * v;
    by.by_x = -along / W.square[i] / size;
  }
  return by;
}

// One pass over the columns of a block: e = p - w K'u and h = w K'alpha, the rows of dx, and the sums over tokens
// da += sum_t u_t (a's factor in v_t), dlambda -= h e. by: [n]. p: [dim].
template <typename C, typename S>
void sweep(const Problem& P, const Workspace<C>& W, const C* a, const C* w, const C* p, const Coefficients<C>* by,
           S* const* dx, C* da, C* dlambda) {
  constexpr int64_t L = LANES<C>;
  int64_t n = W.rows.size(), c = 0;
  for (; c + 2 * L <= P.dim; c += 2 * L) {
    vec<C> u0 = {}, u1 = {}, h0 = {}, h1 = {}, a0 = {}, a1 = {};
    for (int64_t i = 0; i < n; i++) {
      vec<C> x0 = load(W.rows[i] + c), x1 = load(W.rows[i] + c + L);
      u0 += W.gamma[i] * x0, u1 += W.gamma[i] * x1;
      h0 += W.beta[i] * x0, h1 += W.beta[i] * x1;
      a0 += W.delta[i] * x0, a1 += W.delta[i] * x1;
    }
    vec<C> w0 = load(w + c), w1 = load(w + c + L), y0 = load(a + c), y1 = load(a + c + L);
    vec<C> e0 = load(p + c) - w0 * u0, e1 = load(p + c + L) - w1 * u1;
    h0 *= w0, h1 *= w1;
    store(da + c, load(da + c) + a0), store(da + c + L, load(da + c + L) + a1);
    store(dlambda + c, load(dlambda + c) - h0 * e0), store(dlambda + c + L, load(dlambda + c + L) - h1 * e1);
    for (int64_t i = 0; i < n; i++) {
      vec<C> x0 = load(W.rows[i] + c), x1 = load(W.rows[i] + c + L);
      C row[2 * L];
      store(row, by[i].by_e * e0 + by[i].by_h * h0 + by[i].by_x * x0 + by[i].by_a * y0);
      store(row + L, by[i].by_e * e1 + by[i].by_h * h1 + by[i].by_x * x1 + by[i].by_a * y1);
      for (int64_t l = 0; l < 2 * L; l++) narrow(row[l], dx[i][c + l]);
    }
  }
  for (; c < P.dim; c++) {
    C su = 0, sh = 0, sa = 0;
    for (int64_t i = 0; i < n; i++) {
      su += W.gamma[i] * W.rows[i][c], sh += W.beta[i] * W.rows[i][c], sa += W.delta[i] * W.rows[i][c];
    }
    C e = p[c] - w[c] * su, h = w[c] * sh;
    da[c] += sa;
    dlambda[c] -= h * e;
    for (int64_t i = 0; i < n; i++)
      narrow(by[i].by_e * e + by[i].by_h * h + by[i].by_x * W.rows[i][c] + by[i].by_a * a[c], dx[i][c]);
  }
}

template <typename C, typename S>
void backward(const Problem& P, const S* x, const C* a, const C* w, const uint8_t* mask, const S* gradient,
              const C* saved_v, const C* saved_alpha, const C* saved_factor, S* dx, C* da, C* dlambda, C* dtargets) {
#pragma omp parallel num_threads(P.threads)
  {
    Workspace<C> W(P.tokens, P.dim, !std::is_same_v<C, S>);
    std::vector<C> p(P.dim);
    std::vector<Coefficients<C>> by(P.tokens);
    std::vector<S*> dx_rows(P.tokens);
#pragma omp for schedule(static, P.chunk)
    for (int64_t b = 0; b < P.blocks; b++) {  // a chunk of da and dlambda belongs to one thread
      for (int64_t c = 0; c < P.dim; c++) p[c] = w[c] * widen(gradient[b * P.dim + c]);
      gather<C, S>(P, x + b * P.block_stride, mask ? mask + b * P.tokens : nullptr, W);
      norms_and_dots(P, p.data(), W);
      int64_t n = W.rows.size();
      for (int64_t i = 0; i < n; i++) {
        W.v[i] = saved_v[b * P.tokens + W.where[i]];
        W.alpha[i] = saved_alpha[b * P.tokens + W.where[i]];
        W.dot[i] *= W.key[i];
      }
      solve(saved_factor + b * P.tokens * P.tokens, n, W.dot.data(), W.u.data());  // u = A^-1 K p
      S* dx_block = dx + b * P.tokens * P.dim;
      if (n < P.tokens) std::memset(static_cast<void*>(dx_block), 0, P.tokens * P.dim * sizeof(S));
      for (int64_t i = 0; i < n; i++) {
        W.beta[i] = W.key[i] * W.alpha[i];
        W.gamma[i] = W.key[i] * W.u[i];
        W.delta[i] = dtargets ? C(0) : W.target[i] * W.u[i];
        by[i] = coefficients(P, W, i, !dtargets);
        dx_rows[i] = dx_block + W.where[i] * P.dim;
      }
      if (dtargets) scatter(P, W, W.u.data(), dtargets + b * P.tokens);
      int64_t chunk = b / P.chunk;
      sweep<C, S>(P, W, a, w, p.data(), by.data(), dx_rows.data(), da + chunk * P.dim, dlambda + chunk * P.dim);
    }
  }
}

}  // namespace

#define ENTRY_POINTS(NAME, C, S)                                                                                      \
  extern "C" int64_t ttr_forward_##NAME(const Problem* P, const S* x, const C* a, const C* w, const C* targets,       \
                                        const uint8_t* mask, S* out, C* v, C* alpha, C* factor) {                     \
    return forward<C, S>(*P, x, a, w, targets, mask, out, v, alpha, factor);                                          \
  }                                                                                                                   \
  extern "C" void ttr_backward_##NAME(const Problem* P, const S* x, const C* a, const C* w, const uint8_t* mask,      \
                                      const S* gradient, const C* v, const C* alpha, const C* factor, S* dx, C* da,   \
                                      C* dlambda, C* dtargets) {                                                      \
    backward<C, S>(*P, x, a, w, mask, gradient, v, alpha, factor, dx, da, dlambda, dtargets);                         \
  }

// forward: the first block that holds a number that is not finite, or `blocks`; v, alpha and factor are null where no
// gradient is wanted. backward: da and dlambda are [chunks, dim] of zeros, dtargets is null where targets are a . x.
ENTRY_POINTS(f32, float, float)
ENTRY_POINTS(f64, double, double)
ENTRY_POINTS(bf16, float, bf16)
