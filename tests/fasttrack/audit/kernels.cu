// Kernels of many styles, as subjects of the audit. Every one is right: it waits before it touches anything but static
// weights, and contracts.yaml next to this file says what each parameter is.
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdint>

#define KERNEL extern "C" __global__ void
#define WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
#define TRIGGER() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define TID (blockIdx.x * blockDim.x + threadIdx.x)

// --- plain element-wise and reductions ------------------------------------------------------------------------
KERNEL copy_plain(const float* x, float* y, int n) {
  WAIT();
  TRIGGER();
  int i = TID;
  if (i < n) y[i] = x[i];
}
KERNEL bounds_first(const float* x, float* y, int n) {
  int i = TID;
  if (i >= n) return;
  WAIT();
  y[i] = 2.f * x[i];
  TRIGGER();
}
KERNEL add_vec4(const float4* a, const float4* b, float4* y, int n) {
  WAIT();
  for (int i = TID; i < n; i += gridDim.x * blockDim.x) {
    float4 u = a[i], v = b[i];
    y[i] = make_float4(u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w);
  }
  TRIGGER();
}
KERNEL rms_norm(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* y, int d, float eps) {
  __shared__ float part[32];
  float g = __bfloat162float(w[threadIdx.x]);
  WAIT();
  TRIGGER();
  const __nv_bfloat16* row = x + (size_t)blockIdx.x * d;
  float s = 0.f;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    float v = __bfloat162float(row[i]);
    s += v * v;
  }
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (threadIdx.x == 0) part[0] = s;
  }
  __syncthreads();
  float r = rsqrtf(part[0] / d + eps);
  for (int i = threadIdx.x; i < d; i += blockDim.x)
    y[(size_t)blockIdx.x * d + i] = __float2bfloat16(__bfloat162float(row[i]) * r * g);
}
KERNEL residual_inplace(float* x, const float* delta, const float* scale, int n) {
  float s = scale[threadIdx.x];
  WAIT();
  int i = TID;
  if (i < n) x[i] += s * delta[i];
  TRIGGER();
}
KERNEL softmax_row(const float* x, float* y, int n) {
  extern __shared__ float row[];
  WAIT();
  float m = -INFINITY;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    row[i] = x[(int64_t)blockIdx.x * n + i];
    m = fmaxf(m, row[i]);
  }
  for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
  __syncthreads();
  float s = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s += row[i] = __expf(row[i] - m);
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[(int64_t)blockIdx.x * n + i] = row[i] / s;
  TRIGGER();
}
KERNEL half2_gelu(const __half2* x, __half2* y, int n) {
  WAIT();
  TRIGGER();
#pragma unroll 4
  for (int i = TID; i < n; i += 4096) {
    float2 v = __half22float2(x[i]);
    y[i] = __floats2half2_rn(v.x / (1.f + __expf(-1.702f * v.x)), v.y / (1.f + __expf(-1.702f * v.y)));
  }
}
KERNEL bytes_dequant(const uint8_t* q, const float* scale, float* y, int n) {
  WAIT();
  int i = TID;
  if (i < n) y[i] = (float)(q[i] & 15) * scale[i / 32];
  TRIGGER();
}
// --- indices, tables, pointers -----------------------------------------------------------------------------------
KERNEL gather_rows(const float* x, const int* rows, float* y, int d) {
  WAIT();
  int r = rows[blockIdx.x];
  for (int i = threadIdx.x; i < d; i += blockDim.x) y[(size_t)blockIdx.x * d + i] = x[(size_t)r * d + i];
  TRIGGER();
}
KERNEL gather_long(const uint8_t* x, const int64_t* offsets, uint8_t* y) {
  WAIT();
  y[TID] = x[offsets[blockIdx.x] + threadIdx.x];
  TRIGGER();
}
KERNEL scatter_pages(const float* x, float** pages, int n) {
  WAIT();
  int i = TID;
  if (i < n) pages[i / 64][i % 64] = x[i];
  TRIGGER();
}
KERNEL read_pages(float* const* pages, float* y, int n) {
  WAIT();
  int i = TID;
  if (i < n) y[i] = pages[i / 64][i % 64];
  TRIGGER();
}
KERNEL choose_source(const float* a, const float* b, float* y, int n, int which) {
  WAIT();
  const float* src = (blockIdx.x & 1) ? a : b;
  int i = TID;
  if (i < n) y[i] = src[i];
  TRIGGER();
}
KERNEL strided64(const float* x, float* y, int64_t sx, int64_t sy, int n) {
  WAIT();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * sy + i] = x[blockIdx.x * sx + i];
  TRIGGER();
}
struct Args {
  const float* x;
  const float* w;
  float* y;
  int n;
};
KERNEL struct_by_value(Args a) {
  WAIT();
  int i = TID;
  if (i < a.n) a.y[i] = a.x[i] + a.w[i];
  TRIGGER();
}
struct Many {
  const float* src[6];
  float* dst;
  int n;
};
KERNEL struct_of_arrays(const __grid_constant__ Many m) {
  WAIT();
  int i = TID;
  float s = 0.f;
  for (int k = 0; k < 6; ++k)
    if (i + k < m.n) s += m.src[(k + blockIdx.x) % 6][i];
  if (i < m.n) m.dst[i] = s;
  TRIGGER();
}
KERNEL pointer_in_shared(const float* a, const float* b, float* y, int n) {
  __shared__ const float* chosen[2];
  if (threadIdx.x == 0) {
    chosen[0] = a + blockIdx.x * 128;
    chosen[1] = b + blockIdx.x * 128;
  }
  WAIT();
  __syncthreads();
  y[TID] = chosen[threadIdx.x & 1][threadIdx.x];
  TRIGGER();
}
__device__ __noinline__ float fetch(const float* p, int i) { return p[i] * 0.5f; }
KERNEL through_function(const float* x, float* y, int n) {
  WAIT();
  int i = TID;
  if (i < n) y[i] = fetch(x, i) + fetch(x, (i + 1) % n);
  TRIGGER();
}
KERNEL switched(const float* a, const float* b, const float* c, const float* d, float* y, int mode) {
  WAIT();
  int i = TID;
  float v;
  switch ((mode + threadIdx.y) & 7) {
    case 0: v = a[i]; break;
    case 1: v = b[i] * 2.f; break;
    case 2: v = c[i] - 1.f; break;
    case 3: v = d[i] / 3.f; break;
    case 4: v = a[i + 1] + b[i]; break;
    case 5: v = c[i + 2] * d[i]; break;
    default: v = 0.f;
  }
  y[i] = v;
  TRIGGER();
}
__device__ float global_table[256];
KERNEL module_variable(const float* x, float* y) {
  WAIT();
  y[TID] = x[TID] + global_table[threadIdx.x];
  TRIGGER();
}
__constant__ float constant_table[256];
KERNEL constant_variable(const float* x, float* y) {
  float c = constant_table[threadIdx.x];
  WAIT();
  y[TID] = x[TID] + c;
  TRIGGER();
}
// --- where the wait stands ------------------------------------------------------------------------------------------
KERNEL one_thread_waits(const float* x, float* y, int n) {
  if (threadIdx.x == 0) WAIT();
  __syncthreads();
  int i = TID;
  if (i < n) y[i] = x[i];
  TRIGGER();
}
KERNEL first_warp_waits(const float* x, float* y, int n) {
  if (threadIdx.x < 32) {
    WAIT();
    TRIGGER();
  }
  __syncthreads();
  y[TID] = x[TID];
}
KERNEL waits_in_both_arms(const float* x, float* y, int n) {
  if (blockIdx.x & 1) {
    WAIT();
    y[TID] = x[TID];
  } else {
    WAIT();
    y[TID] = -x[TID];
  }
  TRIGGER();
}
KERNEL weights_first(const float* x, const float4* w, float* y) {
  float4 v[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) v[k] = w[TID * 8 + k];
  WAIT();
  TRIGGER();
  float s = 0.f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float4 u = reinterpret_cast<const float4*>(x)[k];
    s += u.x * v[k].x + u.y * v[k].y + u.z * v[k].z + u.w * v[k].w;
  }
  y[TID] = s;
}
KERNEL weights_ldg(const float* x, const float* __restrict__ w, float* y, int n) {
  float a = __ldg(w + TID);
  WAIT();
  float s = 0.f;
  for (int k = 0; k < n; ++k) s += a * x[k];
  y[TID] = s;
  TRIGGER();
}
KERNEL trigger_at_end(const float* x, float* y, int n) {
  WAIT();
  for (int i = TID; i < n; i += 65536) y[i] = sqrtf(x[i]);
}
KERNEL no_pdl(const float* __restrict__ x, float* __restrict__ y, int n) {
  int i = TID;
  if (i < n) y[i] = x[i];
}
// --- copies through shared memory -----------------------------------------------------------------------------------
KERNEL cp_async_double(const float4* x, float4* y, int n) {
  __shared__ __align__(16) float4 buf[2][128];
  WAIT();
  for (int t = 0; t < n + 1; ++t) {
    if (t < n) {
      uint32_t dst = (uint32_t)__cvta_generic_to_shared(&buf[t & 1][threadIdx.x]);
      const float4* src = x + (size_t)t * 128 + threadIdx.x;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
    }
    asm volatile("cp.async.commit_group;");
    if (t > 0) {
      asm volatile("cp.async.wait_group 1;");
      y[(size_t)(t - 1) * 128 + threadIdx.x] = buf[(t - 1) & 1][threadIdx.x];
    }
  }
  TRIGGER();
}
__device__ __forceinline__ void bar_init(uint32_t bar, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n) : "memory");
}
__device__ __forceinline__ void bar_arrive(uint32_t bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bar_wait(uint32_t bar, int phase) {
  asm volatile(
      "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }" ::"r"(bar),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(bar)
               : "memory");
}
#define FENCE_ASYNC() asm volatile("fence.proxy.async.shared::cta;" ::: "memory")
KERNEL bulk_once(const float* x, float* y) {
  __shared__ __align__(128) float buf[1024];
  __shared__ uint64_t bar;
  uint32_t b = (uint32_t)__cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) bar_init(b, 1);
  __syncthreads();
  WAIT();
  if (threadIdx.x == 0) bulk_load((uint32_t)__cvta_generic_to_shared(buf), x + blockIdx.x * 1024, 4096, b);
  bar_wait(b, 0);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) y[blockIdx.x * 1024 + i] = buf[i];
  TRIGGER();
}
// Warp-specialised ring: warp 4 copies weights, four warps consume; the first stages are requested before the wait.
KERNEL bulk_ring(const float* w, const float* x, float* y, int tiles) {
  constexpr int S = 4, T = 1024;
  extern __shared__ __align__(128) uint8_t smem[];
  uint32_t ring = (uint32_t)__cvta_generic_to_shared(smem), full = ring + S * T * 4, empty = full + 8 * S;
  if (threadIdx.x == 0)
    for (int s = 0; s < S; ++s) {
      bar_init(full + 8 * s, 1);
      bar_init(empty + 8 * s, 4);
    }
  __syncthreads();
  const float* base = w + (size_t)blockIdx.x * tiles * T;
  if (threadIdx.x / 32 == 4) {
    if (threadIdx.x % 32 == 0) {
      for (int t = 0; t < S && t < tiles; ++t) bulk_load(ring + t * T * 4, base + t * T, T * 4, full + 8 * t);
      WAIT();
      TRIGGER();
      for (int t = S; t < tiles; ++t) {
        int s = t % S;
        bar_wait(empty + 8 * s, (t / S - 1) & 1);
        bulk_load(ring + s * T * 4, base + (size_t)t * T, T * 4, full + 8 * s);
      }
    }
  } else {
    WAIT();
    float acc = 0.f;
    for (int t = 0; t < tiles; ++t) {
      int s = t % S;
      float v = x[t * 128 + threadIdx.x];
      bar_wait(full + 8 * s, (t / S) & 1);
      for (int k = 0; k < T / 128; ++k) {
        float r;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(ring + (s * T + k * 128 + threadIdx.x) * 4));
        acc += r * v;
      }
      FENCE_ASYNC();
      __syncwarp();
      if (threadIdx.x % 32 == 0) bar_arrive(empty + 8 * s);
    }
    y[blockIdx.x * 128 + threadIdx.x] = acc;
  }
}
// One block copies and consumes the same ring; the barrier is __syncthreads.
KERNEL bulk_pingpong(const float* x, float* y, int tiles) {
  __shared__ __align__(128) float buf[2][512];
  __shared__ uint64_t bars[2];
  uint32_t b = (uint32_t)__cvta_generic_to_shared(bars), d = (uint32_t)__cvta_generic_to_shared(buf);
  if (threadIdx.x == 0) {
    bar_init(b, 1);
    bar_init(b + 8, 1);
  }
  __syncthreads();
  WAIT();
  float acc = 0.f;
  if (threadIdx.x == 0) bulk_load(d, x, 2048, b);
  for (int t = 0; t < tiles; ++t) {
    int s = t & 1;
    if (threadIdx.x == 0 && t + 1 < tiles) bulk_load(d + 2048 * (s ^ 1), x + (t + 1) * 512, 2048, b + 8 * (s ^ 1));
    bar_wait(b + 8 * s, (t >> 1) & 1);
    for (int i = threadIdx.x; i < 512; i += blockDim.x) acc += buf[s][i];
    FENCE_ASYNC();
    __syncthreads();
  }
  y[TID] = acc;
  TRIGGER();
}
KERNEL bulk_out(const float* x, float* y) {
  __shared__ __align__(128) float buf[1024];
  WAIT();
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) buf[i] = 3.f * x[blockIdx.x * 1024 + i];
  FENCE_ASYNC();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y + blockIdx.x * 1024),
                 "r"((uint32_t)__cvta_generic_to_shared(buf)), "r"(4096)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  }
  TRIGGER();
}
KERNEL tma_tile(const __grid_constant__ CUtensorMap wmap, const __grid_constant__ CUtensorMap xmap, float* y) {
  __shared__ __align__(128) float w[1024], x[1024];
  __shared__ uint64_t bar[2];
  uint32_t b = (uint32_t)__cvta_generic_to_shared(bar);
  if (threadIdx.x == 0) {
    bar_init(b, 1);
    bar_init(b + 8, 1);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(b) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            (uint32_t)__cvta_generic_to_shared(w)),
        "l"(&wmap), "r"(0), "r"(blockIdx.x), "r"(b)
        : "memory");
  }
  __syncthreads();
  WAIT();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(b + 8) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            (uint32_t)__cvta_generic_to_shared(x)),
        "l"(&xmap), "r"(0), "r"(blockIdx.x), "r"(b + 8)
        : "memory");
  }
  bar_wait(b, 0);
  bar_wait(b + 8, 0);
  y[TID] = w[threadIdx.x] * x[threadIdx.x];
  TRIGGER();
}
KERNEL wmma_tile(const __half* a, const __half* w, float* c) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, __half, row_major> fa;
  fragment<matrix_b, 16, 16, 16, __half, col_major> fb;
  fragment<accumulator, 16, 16, 16, float> acc;
  fill_fragment(acc, 0.f);
  WAIT();
  for (int k = 0; k < 64; k += 16) {
    load_matrix_sync(fa, a + k, 64);
    load_matrix_sync(fb, w + k, 64);
    mma_sync(acc, fa, fb, acc);
  }
  store_matrix_sync(c + blockIdx.x * 256, acc, 16, mem_row_major);
  TRIGGER();
}
// --- atomics, clusters ------------------------------------------------------------------------------------------------
KERNEL split_k(const float* x, float* y, unsigned* counter, int n) {
  WAIT();
  atomicAdd(y + threadIdx.x, x[TID]);
  __threadfence();
  if (threadIdx.x == 0 && atomicAdd(counter, 1) == gridDim.x - 1) *counter = 0;
  TRIGGER();
}
KERNEL histogram(const int* x, int* bins, int n) {
  __shared__ int local[256];
  local[threadIdx.x] = 0;
  __syncthreads();
  WAIT();
  for (int i = TID; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i] & 255], 1);
  __syncthreads();
  atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
  TRIGGER();
}
KERNEL __cluster_dims__(4, 1, 1) cluster_sum(const float* x, float* y) {
  namespace cg = cooperative_groups;
  __shared__ float part[128];
  auto cluster = cg::this_cluster();
  WAIT();
  part[threadIdx.x] = x[TID];
  cluster.sync();
  if (cluster.block_rank() == 0) {
    float s = 0.f;
    for (int r = 0; r < 4; ++r) s += cluster.map_shared_rank(part, r)[threadIdx.x];
    y[blockIdx.x / 4 * 128 + threadIdx.x] = s;
  }
  cluster.sync();
  TRIGGER();
}
KERNEL topk_loop(const float* scores, int* ids, float* weights_out, int n, int k) {
  WAIT();
  float last = INFINITY;
  for (int j = 0; j < k; ++j) {
    float best = -INFINITY;
    int at = -1;
    for (int i = threadIdx.x; i < n; i += 32) {
      float v = scores[blockIdx.x * n + i];
      if (v < last && v > best) best = v, at = i;
    }
    for (int o = 16; o; o >>= 1) {
      float v = __shfl_xor_sync(~0u, best, o);
      int a = __shfl_xor_sync(~0u, at, o);
      if (v > best) best = v, at = a;
    }
    last = best;
    if (threadIdx.x == 0) ids[blockIdx.x * k + j] = at, weights_out[blockIdx.x * k + j] = best;
  }
  TRIGGER();
}
KERNEL list_walk(const int* next, const float* value, float* y, int steps) {
  WAIT();
  int at = TID;
  float s = 0.f;
  for (int k = 0; k < steps && at >= 0; ++k) {
    s += value[at];
    at = next[at];
  }
  y[TID] = s;
  TRIGGER();
}
// --- mailboxes --------------------------------------------------------------------------------------------------------
KERNEL mailbox_push(const uint4* x, uint64_t* peers, int rank) {
  WAIT();
  TRIGGER();
  uint4 v = x[TID];
  for (int p = 0; p < 8; ++p) {
    uint64_t to = peers[p] + ((uint64_t)rank * 4096 + TID) * 16;
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
}
KERNEL mailbox_pull(uint32_t* box, float* y) {
  WAIT();
  TRIGGER();
  float s = 0.f;
  for (int p = 0; p < 8; ++p) {
    uint32_t* at = box + p * 4096 + TID;
    uint32_t v;
    do asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    while (v == 0x80000000u);
    s += __uint_as_float(v);
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(at), "r"(0x80000000u) : "memory");
  }
  y[TID] = s;
}
KERNEL mailbox_pull_bounded(volatile uint32_t* box, float* y, int* late) {
  WAIT();
  TRIGGER();
  long long begin = clock64();
  uint32_t v = box[TID];
  while (v == 0xffffffffu) {
    if (clock64() - begin > 1000000000) {
      *late = 1;
      break;
    }
    v = box[TID];
  }
  box[TID] = 0xffffffffu;
  y[TID] = __uint_as_float(v);
}
KERNEL grid_barrier(const float* x, float* y, unsigned* flag) {
  WAIT();
  y[TID] = x[TID];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(flag, 1);
    unsigned v;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    while (v < gridDim.x);
  }
  __syncthreads();
  TRIGGER();
}
