/* The names of the kernels: each set of instructions has its own, as `gemm_avx2`. */
#ifndef KERNELS_H
#define KERNELS_H

#ifndef INSTRUCTIONS
#error "INSTRUCTIONS names the set of instructions that this is compiled for"
#endif

#define JOIN(name, set) name##_##set
#define NAME(name, set) JOIN(name, set)
#define KERNEL(name) NAME(name, INSTRUCTIONS)

#endif
