# Products with matrices of few bits, which need the vectors of GCC and Clang, and threads: compiled
# once for each set of instructions. Which of them run is chosen when they do.
find_package(Threads REQUIRED)
add_library(rows STATIC ${CMAKE_CURRENT_LIST_DIR}/src/levels.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/team.cpp)
set_target_properties(rows PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(rows PUBLIC Threads::Threads)

function(add_rows level)
  add_library(rows_${level} OBJECT ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/src/rows.cpp)
  set_target_properties(rows_${level} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(rows_${level} PRIVATE LEVEL=${level})
  target_compile_options(rows_${level} PRIVATE -ffp-contract=off -Wall -Wextra -Wno-psabi ${ARGN})
  target_sources(rows PRIVATE $<TARGET_OBJECTS:rows_${level}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  add_rows(plain)
  add_rows(avx2 -mavx2 -mf16c)
  add_rows(avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512vnni
      -mprefer-vector-width=512)
  target_compile_definitions(rows PRIVATE WIDE_ROWS)
  # Clang compiled for it long before it could ask for it.
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -mavxvnni)
  check_cxx_source_compiles("int main() { return __builtin_cpu_supports(\"avxvnni\"); }"
      COMPILES_AVXVNNI)
  unset(CMAKE_REQUIRED_FLAGS)
  if(COMPILES_AVXVNNI)
    add_rows(avxvnni -mavx2 -mf16c -mavxvnni)
    target_compile_definitions(rows PRIVATE AVXVNNI_ROWS)
  endif()
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mamx-int8 COMPILES_AMX)
  if(COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    add_rows(amx -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512vnni -mamx-tile -mamx-int8
        -mprefer-vector-width=512)
    target_compile_definitions(rows PRIVATE AMX_ROWS)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
  # A compiler for Apple's processors takes all of their instructions, if it is not told.
  add_rows(plain -march=armv8-a)
  add_rows(dotprod -march=armv8.2-a+dotprod)
  target_compile_definitions(rows PRIVATE ARM_ROWS)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=armv8.2-a+dotprod+i8mm COMPILES_I8MM)
  if(COMPILES_I8MM)
    add_rows(i8mm -march=armv8.2-a+dotprod+i8mm)
    target_compile_definitions(rows PRIVATE I8MM_ROWS)
  endif()
else()
  add_rows(plain)
endif()
