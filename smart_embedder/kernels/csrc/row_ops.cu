// The operations between two matrix products, each in one pass over the memory. The fields of
// `Backend` in ../backend.py define them. Compiled at the start for the present GPU, without headers;
// the compiler's options define the type of numbers: FLOAT16, BFLOAT16 or FLOAT32.
// A thread holds eight neighbouring numbers of a row, so rows are multiples of eight and aligned.

#ifndef HALF_CONVERSIONS // A test defines others, to run this on a CPU.
__device__ unsigned short half_of(float x)
{
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}
__device__ float of_half(unsigned short half)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
__device__ float rough_tanhf(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#define rough_tanhf tanhf
#endif

// e4m3 has an exponent bias of 7, a smallest exponent of -6, and three bits of mantissa.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ unsigned short eight_bits_of(float first, float second)
{
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(both) : "f"(first), "f"(second));
    return both;
}
#else
__device__ unsigned char eight_bits_of(float x)
{
    unsigned bits = __float_as_uint(x), size = bits & 0x7fffffff, code;
    if (x != x)
        return 0x7f;
    if (size < 0x3c800000) // Below 2^-6 the addition rounds to multiples of 2^-9.
        code = __float_as_uint(__uint_as_float(size) + 16384) - __float_as_uint(16384);
    else
        code = (size + 0x7ffff + (size >> 20 & 1) >> 20) - (120 << 3);
    return bits >> 24 & 0x80 | code;
}
__device__ unsigned short eight_bits_of(float first, float second)
{
    return eight_bits_of(first) | eight_bits_of(second) << 8;
}
#endif

#if defined(FLOAT16)
typedef unsigned short number;
__device__ float widen(number x) { return of_half(x); }
__device__ number narrow(float x) { return half_of(x); }
#elif defined(BFLOAT16)
typedef unsigned short number;
__device__ float widen(number x) { return __uint_as_float((unsigned)x << 16); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ number narrow(float x)
{
    number narrowed;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrowed) : "f"(x));
    return narrowed;
}
#else
__device__ number narrow(float x)
{
    unsigned bits = __float_as_uint(x);
    if (x != x)
        return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; // Rounds to the nearest, ties to even.
}
#endif
#else
typedef float number;
__device__ float widen(number x) { return x; }
__device__ number narrow(float x) { return x; }
#endif

#define EIGHT 8

struct alignas(16) Packed {
    number at[EIGHT];
};
struct Eight {
    float at[EIGHT];
};

__device__ Eight load(const number *from)
{
    Packed packed = *reinterpret_cast<const Packed *>(from);
    Eight wide;
    for (int i = 0; i < EIGHT; i++)
        wide.at[i] = widen(packed.at[i]);
    return wide;
}

__device__ void store(number *to, const Eight &wide)
{
    Packed packed;
    for (int i = 0; i < EIGHT; i++)
        packed.at[i] = narrow(wide.at[i]);
    *reinterpret_cast<Packed *>(to) = packed;
}

__device__ float warp_sum(float x)
{
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum over all threads of the block, in the same order for every row.
__device__ float block_sum(float x)
{
    __shared__ float sums[32];
    x = warp_sum(x);
    __syncthreads(); // All threads have read the sums of the last call.
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++)
        total += sums[warp];
    return total;
}

// The larger of two numbers that are not negative, or NaN, whose bits are larger than any number's.
__device__ float larger(float x, float y)
{
    return __float_as_uint(x) > __float_as_uint(y) ? x : y;
}

__device__ float block_max(float x)
{
    __shared__ float largest[32];
    for (int step = 16; step; step /= 2)
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0)
        largest[threadIdx.x / 32] = x;
    __syncthreads();
    // Each warp finds the largest of all warps; there are at most as many warps as lanes.
    int lane = threadIdx.x % 32;
    x = lane < (int)blockDim.x / 32 ? largest[lane] : 0;
    for (int step = 16; step; step /= 2)
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Store the norm of the sum of two rows. A thread `inside` the row holds eight numbers of both, any
// other thread holds zeros.
__device__ void store_norm(Eight x, const Eight &other, bool inside, number *row,
                           const number *weight, const number *bias, float epsilon, int width)
{
    int column = threadIdx.x * EIGHT;
    float sum = 0;
    for (int i = 0; i < EIGHT; i++)
        sum += x.at[i] += other.at[i];
    float mean = block_sum(sum) / width, squares = 0;
    for (int i = 0; inside && i < EIGHT; i++) {
        x.at[i] -= mean;
        squares += x.at[i] * x.at[i];
    }
    float scale = rsqrtf(block_sum(squares) / width + epsilon);
    if (!inside)
        return;
    Eight by = load(weight + column), plus = load(bias + column);
    for (int i = 0; i < EIGHT; i++)
        x.at[i] = x.at[i] * scale * by.at[i] + plus.at[i];
    store(row + column, x);
}

// A block computes one row here and in the kernels below, unless they say otherwise.
extern "C" __global__ void add_norm(number *states, const number *residual, const number *weight,
                                    const number *bias, float epsilon, int width)
{
    int column = threadIdx.x * EIGHT;
    bool inside = column < width;
    number *row = states + (long long)blockIdx.x * width;
    Eight x = {}, other = {};
    if (inside) {
        x = load(row + column);
        other = load(residual + (long long)blockIdx.x * width + column);
    }
    store_norm(x, other, inside, row, weight, bias, epsilon, width);
}

// The tables have `vocabulary` and `longest` rows. Any other id gives a row of NaN, which fails its
// text; an illegal access would end the process.
extern "C" __global__ void embed(const long long *ids, const number *tokens,
                                 const long long *position_ids, const number *positions,
                                 const number *weight, const number *bias, number *output,
                                 float epsilon, int vocabulary, int longest, int width)
{
    int column = threadIdx.x * EIGHT;
    bool inside = column < width;
    long long id = ids[blockIdx.x], position = position_ids[blockIdx.x];
    Eight x = {}, other = {};
    if (id < 0 || id >= vocabulary || position < 0 || position >= longest) {
        x.at[0] = __uint_as_float(0x7fc00000);
    } else if (inside) {
        x = load(tokens + id * width + column);
        other = load(positions + position * width + column);
    }
    number *row = output + (long long)blockIdx.x * width;
    store_norm(x, other, inside, row, weight, bias, epsilon, width);
}

extern "C" __global__ void rms_norm(const number *states, const number *weight, number *output,
                                    float epsilon, int width)
{
    int column = threadIdx.x * EIGHT;
    bool inside = column < width;
    long long place = (long long)blockIdx.x * width + column;
    Eight x = {};
    float squares = 0;
    if (inside)
        x = load(states + place);
    for (int i = 0; i < EIGHT; i++)
        squares += x.at[i] * x.at[i];
    float scale = rsqrtf(block_sum(squares) / width + epsilon);
    if (!inside)
        return;
    Eight by = load(weight + column);
    for (int i = 0; i < EIGHT; i++)
        x.at[i] *= scale * by.at[i];
    store(output + place, x);
}

// `indices` selects rows of `states`; null selects all. `output` is float32, or float16 if `half` is
// set.
extern "C" __global__ void unit_rows(const number *states, const long long *indices, void *output,
                                     float *lengths, float shortest, int half, int width)
{
    int column = threadIdx.x * EIGHT;
    bool inside = column < width;
    long long row = indices ? indices[blockIdx.x] : blockIdx.x;
    Eight x = {};
    float squares = 0;
    if (inside)
        x = load(states + row * width + column);
    for (int i = 0; i < EIGHT; i++)
        squares += x.at[i] * x.at[i];
    float length = sqrtf(block_sum(squares));
    if (threadIdx.x == 0)
        lengths[blockIdx.x] = length;
    long long place = (long long)blockIdx.x * width + column;
    for (int i = 0; inside && i < EIGHT; i++) {
        float unit = x.at[i] / fmaxf(length, shortest);
        if (half)
            static_cast<unsigned short *>(output)[place + i] = half_of(unit);
        else
            static_cast<float *>(output)[place + i] = unit;
    }
}

// A block computes one token, and each of its warps some of the heads. Tokens are `stride` numbers
// apart.
extern "C" __global__ void rotary(number *states, const number *weight, const float *cosines,
                                  const float *sines, float epsilon, int stride, int heads, int width)
{
    int lane = threadIdx.x % 32, half = width / 2;
    const float *cosine = cosines + (long long)blockIdx.x * half;
    const float *sine = sines + (long long)blockIdx.x * half;
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        number *x = states + (long long)blockIdx.x * stride + head * width;
        const number *by = weight + head * width;
        float squares = 0;
        for (int i = lane; i < width; i += 32)
            squares += widen(x[i]) * widen(x[i]);
        float scale = rsqrtf(warp_sum(squares) / width + epsilon);
        for (int i = lane; i < half; i += 32) {
            float first = widen(x[i]) * scale * widen(by[i]);
            float second = widen(x[i + half]) * scale * widen(by[i + half]);
            x[i] = narrow(first * cosine[i] - second * sine[i]);
            x[i + half] = narrow(second * cosine[i] + first * sine[i]);
        }
    }
}

// A thread computes eight numbers of `output`; `count` is the number of such groups.
extern "C" __global__ void gate(const number *states, number *output, long long count, int width)
{
    long long eight = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (eight >= count)
        return;
    long long row = eight * EIGHT / width, column = eight * EIGHT % width;
    Eight x = load(states + 2 * row * width + column);
    Eight through = load(states + (2 * row + 1) * width + column);
    for (int i = 0; i < EIGHT; i++)
        x.at[i] = x.at[i] / (1 + expf(-x.at[i])) * through.at[i];
    store(output + eight * EIGHT, x);
}

// x Phi(x). The complement of the normal distribution follows formula 7.1.26 of Abramowitz and Stegun,
// whose error of 1.5e-7 is far below the rounding to 16 bits.
__device__ float gelu_of(float x)
{
    float size = fabsf(x), t = __fdividef(1.0f, 1 + 0.2316419f * size);
    float complement =
        t * (0.254829592f +
             t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return fmaxf(x, 0) - 0.5f * size * complement * __expf(-0.5f * x * x);
}

// A thread computes eight numbers in place; `count` is the number of such groups.
extern "C" __global__ void gelu(number *states, long long count)
{
    long long eight = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (eight >= count)
        return;
    Eight x = load(states + eight * EIGHT);
    for (int i = 0; i < EIGHT; i++)
        x.at[i] = gelu_of(x.at[i]);
    store(states + eight * EIGHT, x);
}

struct alignas(EIGHT) Bytes {
    unsigned short at[EIGHT / 2];
};

// GELU with an error below 3e-4, a hundredth of the steps of float8.
__device__ float rough_gelu_of(float x)
{
    float square = fminf(x * x, 30); // Above that the polynomial would fall.
    float bent = x * (0.797508f + square * (0.0370057f - 0.000351535f * square));
    return 0.5f * x + 0.5f * x * rough_tanhf(bent);
}

// A thread holds this many times eight numbers of a row, and loads all of them before it waits.
#define TIMES 4

// Round rows to float8, or GELU of the rows if `activated` is set.
extern "C" __global__ void float8_rows(const number *states, unsigned char *output, float *scales,
                                       int activated, int width)
{
    long long begin = (long long)blockIdx.x * width;
    Eight x[TIMES] = {};
    float most = 1e-30f;
    for (int k = 0; k < TIMES; k++) {
        int column = (k * blockDim.x + threadIdx.x) * EIGHT;
        if (column < width)
            x[k] = load(states + begin + column);
    }
    for (int k = 0; k < TIMES; k++)
        for (int i = 0; i < EIGHT; i++) {
            if (activated)
                x[k].at[i] = rough_gelu_of(x[k].at[i]);
            most = larger(most, fabsf(x[k].at[i]));
        }
    most = block_max(most);
    if (threadIdx.x == 0)
        scales[blockIdx.x] = most / 448;
    float steps = 448 / most;
    for (int k = 0; k < TIMES; k++) {
        int column = (k * blockDim.x + threadIdx.x) * EIGHT;
        Bytes bytes;
        for (int i = 0; i < EIGHT; i += 2)
            bytes.at[i / 2] = eight_bits_of(x[k].at[i] * steps, x[k].at[i + 1] * steps);
        if (column < width)
            *reinterpret_cast<Bytes *>(output + begin + column) = bytes;
    }
}
