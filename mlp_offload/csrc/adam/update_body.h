// The arithmetic of the AdamW step, written once. A variant's source defines ADAM_TARGET (the attribute of its
// instruction set), includes this file, and defines a vector type V; all variants then do the same operations in the
// same order, each rounded once (IEEE multiply, add, divide, square root, and fused multiply-add where `fma` is
// written), so they give the same bits. It is the arithmetic of the vector body of torch.optim.AdamW(fused=True) on
// the CPU.
//
// A vector type has:
//   width                                  elements in a register
//   Register                               fp32 values
//   broadcast(float)
//   load(const float* | Bf16* | Fp16*)     widened to fp32
//   store(float* | Bf16* | Fp16*, r)       rounded to nearest even; a NaN stays a (quiet) NaN
//   add, sub, mul, div, sqrt, fma(a, b, c) = a * b + c rounded once
//   magnitude(r)                           the sign bit cleared
//   join(const Bf16*, const Remainder*, r) the master, r being the stored exp_avg_sq; see [Note: remainder]
//   split(master, exp_avg_sq, Bf16*, Remainder*, float*)   the other way; the last is where exp_avg_sq goes
//
// No include guard and an unnamed namespace on purpose: each variant needs its own copy, compiled for its target.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "adam/update.h"

#define ADAM_INLINE ADAM_TARGET static inline __attribute__((always_inline))

namespace mlp_offload::adam {
namespace {

struct NoWeight {};
template <class Weight>
constexpr bool writes = !std::is_same_v<Weight, NoWeight>;

template <class Main>
constexpr bool is_remainder = std::is_same_v<Main, Remainder>;

template <class V>
struct Broadcast {
  typename V::Register decay, lerp, beta2, one_minus_beta2, eps, step_size, bias_correction2_sqrt, inverse_scale, clip;
  bool from_grad;
};

// [Note: lerp] exp_avg moves from its old value towards the gradient by 1 - beta1. Like torch's lerp, it starts from
// the nearer end: exp_avg + w * (g - exp_avg) for w < 0.5, and g + (w - 1) * (g - exp_avg) otherwise.
template <class V>
ADAM_INLINE Broadcast<V> broadcast(const Scalars& s) {
  const bool from_grad = !(s.one_minus_beta1 < 0.5f);
  Broadcast<V> b;
  b.decay = V::broadcast(s.decay);
  b.lerp = V::broadcast(from_grad ? s.one_minus_beta1 - 1.0f : s.one_minus_beta1);
  b.beta2 = V::broadcast(s.beta2);
  b.one_minus_beta2 = V::broadcast(s.one_minus_beta2);
  b.eps = V::broadcast(s.eps);
  b.step_size = V::broadcast(s.step_size);
  b.bias_correction2_sqrt = V::broadcast(s.bias_correction2_sqrt);
  b.inverse_scale = V::broadcast(s.inverse_scale);
  b.clip = V::broadcast(s.clip_coefficient);
  b.from_grad = from_grad;
  return b;
}

// V::width elements.
template <class V, class Main, class Grad, class Weight>
ADAM_INLINE void step(const Broadcast<V>& s, Main* main_param, float* exp_avg, float* exp_avg_sq, const Grad* grad,
                      Weight* weight) {
  using R = typename V::Register;
  R p_old, v_old = V::load(exp_avg_sq);
  if constexpr (is_remainder<Main>) {
    p_old = V::join(weight, main_param, v_old);
    v_old = V::magnitude(v_old);
  } else {
    p_old = V::load(main_param);
  }
  const R g = V::mul(V::mul(V::load(grad), s.inverse_scale), s.clip);
  const R p = V::mul(p_old, s.decay);
  const R m_old = V::load(exp_avg);
  const R m = V::fma(s.lerp, V::sub(g, m_old), s.from_grad ? g : m_old);
  const R v = V::fma(V::mul(s.one_minus_beta2, g), g, V::mul(v_old, s.beta2));
  const R d = V::add(V::div(V::sqrt(v), s.bias_correction2_sqrt), s.eps);
  const R p_new = V::sub(p, V::div(V::mul(s.step_size, m), d));
  V::store(exp_avg, m);
  if constexpr (is_remainder<Main>) {
    V::split(p_new, v, weight, main_param, exp_avg_sq);
  } else {
    V::store(main_param, p_new);
    V::store(exp_avg_sq, v);
    if constexpr (writes<Weight>) V::store(weight, p_new);
  }
}

// Fewer than V::width elements: the same step on a padded copy, so that a tail has no arithmetic of its own.
template <class V, class Main, class Grad, class Weight>
ADAM_TARGET void partial_step(const Broadcast<V>& s, std::size_t numel, Main* main_param, float* exp_avg,
                              float* exp_avg_sq, const Grad* grad, Weight* weight) {
  Main p[V::width] = {};
  float m[V::width] = {}, v[V::width] = {};
  Grad g[V::width] = {};
  Weight w[V::width] = {};
  std::memcpy(p, main_param, numel * sizeof(Main));
  std::memcpy(m, exp_avg, numel * sizeof(float));
  std::memcpy(v, exp_avg_sq, numel * sizeof(float));
  std::memcpy(g, grad, numel * sizeof(Grad));
  if constexpr (is_remainder<Main>) std::memcpy(w, weight, numel * sizeof(Weight));
  step<V>(s, p, m, v, g, w);
  std::memcpy(main_param, p, numel * sizeof(Main));
  std::memcpy(exp_avg, m, numel * sizeof(float));
  std::memcpy(exp_avg_sq, v, numel * sizeof(float));
  if constexpr (writes<Weight>) std::memcpy(weight, w, numel * sizeof(Weight));
}

template <class V, class Main, class Grad, class Weight>
ADAM_TARGET void update(const Run& run, const Scalars& scalars) {
  const Broadcast<V> s = broadcast<V>(scalars);
  Main* p = static_cast<Main*>(run.main_param);
  float *m = run.exp_avg, *v = run.exp_avg_sq;
  const Grad* g = static_cast<const Grad*>(run.grad);
  Weight* w = static_cast<Weight*>(run.weight);
  const std::size_t numel = run.numel;

  // A first partial vector brings the state to a register boundary: loads that cross cache lines cost bandwidth.
  constexpr std::size_t kWidth = V::width;
  const std::size_t past = reinterpret_cast<std::uintptr_t>(m) / sizeof(float) % kWidth;
  const std::size_t head = std::min(numel, (kWidth - past) % kWidth);
  if (head != 0) partial_step<V>(s, head, p, m, v, g, w);
  std::size_t i = head;
  for (; i + kWidth <= numel; i += kWidth) step<V>(s, p + i, m + i, v + i, g + i, writes<Weight> ? w + i : w);
  if (i != numel) partial_step<V>(s, numel - i, p + i, m + i, v + i, g + i, writes<Weight> ? w + i : w);
}

// A plain loop, which the compiler turns into vectors of the target.
ADAM_TARGET inline std::uint32_t sum_words(const std::uint16_t* words, std::size_t count, std::size_t first) {
  std::uint32_t sum = 0, factor = static_cast<std::uint32_t>(2 * first + 1);
  for (std::size_t i = 0; i != count; ++i) sum += words[i] * (factor + 2 * static_cast<std::uint32_t>(i));
  return sum;
}

template <class V, class Grad>
constexpr void fill_rows(UpdateTable& table, std::int64_t grad) {
  table.update[grad][kFp32] = update<V, float, Grad, float>;
  table.update[grad][kBf16] = update<V, float, Grad, Bf16>;
  table.update[grad][kFp16] = update<V, float, Grad, Fp16>;
  table.update[grad][kDtypeCount] = update<V, float, Grad, NoWeight>;
  table.update_remainder[grad] = update<V, Remainder, Grad, Bf16>;
}

template <class V>
constexpr UpdateTable make_table() {
  UpdateTable table{};
  fill_rows<V, float>(table, kFp32);
  fill_rows<V, Bf16>(table, kBf16);
  fill_rows<V, Fp16>(table, kFp16);
  table.sum_words = sum_words;
  return table;
}

}  // namespace
}  // namespace mlp_offload::adam
