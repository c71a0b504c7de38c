// Runs row_ops.cu on a CPU: the threads of a block are coroutines, which take turns at each barrier.
#include <cmath>
#include <cstring>
#include <functional>
#include <immintrin.h>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__ static
#define __shared__ static
#define HALF_CONVERSIONS

struct Place {
    unsigned x;
};
static Place threadIdx, blockIdx, blockDim;
static ucontext_t scheduler, contexts[1024];
static bool done[1024];
static float lanes[1024];
static const std::function<void()> *kernel;

static void __syncthreads()
{
    unsigned thread = threadIdx.x;
    swapcontext(&contexts[thread], &scheduler);
    threadIdx.x = thread;
}

static float __shfl_xor_sync(unsigned, float x, int step)
{
    lanes[threadIdx.x] = x;
    __syncthreads();
    float other = lanes[threadIdx.x ^ step];
    __syncthreads();
    return other;
}

static unsigned __float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof x);
    return bits;
}
static float __uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define __expf(x) std::exp(float(x)) // glibc has one of its own.
static float __fdividef(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static unsigned short half_of(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
static float of_half(unsigned short half) { return _cvtsh_ss(half); }

#include SOURCE

static void thread_body()
{
    unsigned thread = threadIdx.x;
    (*kernel)();
    done[thread] = true;
    swapcontext(&contexts[thread], &scheduler);
}

static void emulate(int blocks, int threads, const std::function<void()> &body)
{
    static std::vector<char> stacks(1024 * 16384);
    kernel = &body;
    blockDim.x = threads;
    for (int block = 0; block < blocks; block++) {
        blockIdx.x = block;
        for (int i = 0; i < threads; i++) {
            done[i] = false;
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp = &stacks[i * 16384];
            contexts[i].uc_stack.ss_size = 16384;
            contexts[i].uc_link = nullptr;
            makecontext(&contexts[i], thread_body, 0);
        }
        for (bool waits = true; waits;) {
            waits = false;
            for (int i = 0; i < threads; i++) {
                if (done[i])
                    continue;
                threadIdx.x = i;
                swapcontext(&scheduler, &contexts[i]);
                waits |= !done[i];
            }
        }
    }
}

#define RUN(name, parameters, arguments)                                                           \
    extern "C" void run_##name(int blocks, int threads, parameters)                                \
    {                                                                                              \
        emulate(blocks, threads, [&] { name arguments; });                                         \
    }
#define P(...) __VA_ARGS__
RUN(embed, P(long long *a, number *b, long long *c, number *d, number *e, number *f, number *g,
             float h, int i, int j, int w), (a, b, c, d, e, f, g, h, i, j, w))
RUN(add_norm, P(number *a, number *b, number *c, number *d, float e, int w), (a, b, c, d, e, w))
RUN(rms_norm, P(number *a, number *b, number *c, float e, int w), (a, b, c, e, w))
RUN(rotary, P(number *a, number *b, float *c, float *d, float e, int s, int h, int w),
    (a, b, c, d, e, s, h, w))
RUN(gate, P(number *a, number *b, long long n, int w), (a, b, n, w))
RUN(gelu, P(number *a, long long n), (a, n))
RUN(float8_rows, P(number *a, unsigned char *b, float *c, int g, int w), (a, b, c, g, w))
RUN(unit_rows, P(number *a, long long *b, void *c, float *d, float e, int h, int w),
    (a, b, c, d, e, h, w))
