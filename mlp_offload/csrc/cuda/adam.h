// The AdamW step on the device: the arithmetic of adam/update_body.h, over the same records and segments as on the host.
#pragma once

#include "adam/segment.h"
#include "cuda/element.h"

namespace mlp_offload::cuda {
namespace {

struct AdamRow {
  void* main_param;  // float, or Remainder
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* weight;
  std::int64_t numel;
  unsigned first_block;
  std::int16_t grad_dtype, weight_dtype;  // weight_dtype kDtypeCount: no weight is written
  adam::Scalars scalars;
};

template <class Main>
__device__ inline void adam_quad(const AdamRow& row, const adam::Broadcast<Rounded>& scalars, const Quad& quad) {
  Main* const main_param = static_cast<Main*>(row.main_param) + quad.first;
  float *const exp_avg = row.exp_avg + quad.first, *const exp_avg_sq = row.exp_avg_sq + quad.first;
  Main p[4] = {};
  float m[4] = {}, v[4] = {}, g[4] = {};
  load(p, main_param, quad.count);
  load(m, exp_avg, quad.count);
  load(v, exp_avg_sq, quad.count);
  load_as(row.grad_dtype, g, row.grad, quad.first, quad.count);
  if constexpr (adam::is_remainder<Main>) {
    Bf16* const weight = static_cast<Bf16*>(row.weight) + quad.first;
    Bf16 w[4] = {};
    load(w, weight, quad.count);
    for (int i = 0; i != 4; ++i) adam::step<Rounded>(scalars, p + i, m + i, v + i, g + i, w + i);
    store(weight, w, quad.count);
  } else {
    adam::NoWeight* const none = nullptr;
    for (int i = 0; i != 4; ++i) adam::step<Rounded>(scalars, p + i, m + i, v + i, g + i, none);
    store_as(row.weight_dtype, row.weight, p, quad.first, quad.count);
  }
  store(main_param, p, quad.count);
  store(exp_avg, m, quad.count);
  store(exp_avg_sq, v, quad.count);
}

// One block a tile of a row. Vectors start where those of exp_avg do; the other arrays follow where they can.
template <class Main>
__global__ void __launch_bounds__(kThreads) adam_step(const Batch<AdamRow> __grid_constant__ batch) {
  const AdamRow& row = row_of_block(batch);
  const adam::Broadcast<Rounded> scalars = adam::broadcast<Rounded>(row.scalars);
  const unsigned past = elements_past(reinterpret_cast<std::uintptr_t>(row.exp_avg), sizeof(float));
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x - row.first_block) * kTileQuads + threadIdx.x;
  for (unsigned i = 0; i != kQuadsPerThread; ++i) {
    const Quad quad(begin + i * kThreads, past, row.numel);
    if (quad.count > 0) adam_quad<Main>(row, scalars, quad);
  }
}

inline void run_adam(std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
                     const adam::Segment* segments, std::int64_t segment_count, const adam::Scalars* groups,
                     std::int64_t group_count, std::uint64_t stream) {
  adam::check_update(state_address, stride_numel, main_itemsize, segments, segment_count, group_count);
  char* const state = reinterpret_cast<char*>(state_address);
  float* const exp_avg = reinterpret_cast<float*>(state + stride_numel * main_itemsize);
  const auto kernel = main_itemsize == sizeof(adam::Remainder) ? adam_step<adam::Remainder> : adam_step<float>;
  Batcher<AdamRow> rows(
      [&](const Batch<AdamRow>& batch) { launch(kernel, batch.block_count, kThreads, stream, batch); });
  for (const adam::Segment* s = segments; s != segments + segment_count; ++s) {
    if (s->grad_address == 0) continue;
    float* const m = exp_avg + s->offset_numel;
    const std::int64_t weight_dtype = s->weight_address ? s->weight_dtype : adam::kDtypeCount;
    rows.add({state + s->offset_numel * main_itemsize, m, m + stride_numel,
              reinterpret_cast<const void*>(s->grad_address), reinterpret_cast<void*>(s->weight_address), s->numel, 0,
              static_cast<std::int16_t>(s->grad_dtype), static_cast<std::int16_t>(weight_dtype), groups[s->group]},
             elements_past(reinterpret_cast<std::uintptr_t>(m), sizeof(float)));
  }
  rows.finish();
}

}  // namespace
}  // namespace mlp_offload::cuda
